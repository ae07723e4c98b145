"""Paged caches: appends and what they are addressed by (flashinfer.page)."""

import torch

from .. import _folio as folio
from . import arguments
from .plans import context_of, device_of


def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """Keys of each request: (pages - 1) * page_size + last_page_len, and 0 where there are no pages."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.clamp(pages - 1, min=0) * page_size + torch.where(pages > 0, kv_last_page_len, 0)


def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """The request and the position of each appended token, the last ones of its request: int32 [nnz], both.

    Entries from append_indptr[-1] on are padding, -1. batch_indices and positions, where given, are written. Waits for
    nothing.
    """
    device = append_indptr.device
    tokens = torch.arange(nnz, dtype=torch.int32, device=device)
    rows = torch.searchsorted(append_indptr[1:].contiguous(), tokens, right=True, out_int32=True)
    requests = seq_lens.shape[0]
    real = rows < requests
    at = rows.clamp(max=max(requests - 1, 0)).long()
    if requests:
        places = tokens - append_indptr[at + 1] + seq_lens[at]
    else:
        places = tokens
    rows = torch.where(real, rows, -1).to(torch.int32)
    places = torch.where(real, places, -1).to(torch.int32)
    for given, result in ((batch_indices, rows), (positions, places)):
        if given is not None:
            given[:nnz].copy_(result)
    return (rows if batch_indices is None else batch_indices), (places if positions is None else positions)


def _slots(context, device, batch_indices, positions, kv_indices, kv_indptr, page_size):
    """Slots [tokens] of the tokens at these positions of their requests' pages."""
    ids = arguments.on_device(kv_indices, device)
    offsets = arguments.on_device(kv_indptr, device)
    rows = arguments.on_device(batch_indices, device)
    places = arguments.on_device(positions, device)
    if device.type == "cpu":
        return folio.slot_mapping(folio.csr_table(ids, offsets), rows.numpy(), places.numpy(), page_size)
    slots = torch.empty(rows.shape, dtype=torch.int64, device=device)
    folio.slot_mapping(context, folio.csr_table(ids, offsets), rows, places, page_size, slots)
    return slots


def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
                          kv_last_page_len, kv_layout="NHD"):
    """Writes keys and values [tokens, kv heads, head_dim] into their requests' pages.

    Token i goes to position positions[i] of request batch_indices[i]; negative positions are left out. The pages must
    be there already. kv_last_page_len is not read, since positions say it. On a CPU a slot beyond the cache is refused.
    """
    hnd = arguments.is_hnd(kv_layout)
    device = device_of(append_key)
    context = context_of(device)
    k, v = arguments.split_cache(paged_kv_cache, hnd)
    page_size = k.shape[2] if hnd else k.shape[1]
    view = (folio.make_hnd_view if hnd else folio.make_nhd_view)(k, v)
    slots = _slots(context, device, batch_indices, positions, kv_indices, kv_indptr, page_size)
    folio.write_kv_cache(context, folio.CacheWriteArgs(append_key, append_value, slots, view))


def append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices,
                              kv_indptr, kv_last_page_len):
    """append_paged_kv_cache for MLA: append_ckv [tokens, 512] and append_kpe [tokens, 64] into ckv_cache [pages,
    page_size, 512] and kpe_cache [pages, page_size, 64]; a cache that is None is left alone."""
    if ckv_cache is None and kpe_cache is None:
        raise ValueError("ckv_cache and kpe_cache are both None; one of them must be given")
    given = [(append, cache) for append, cache in ((append_ckv, ckv_cache), (append_kpe, kpe_cache))
             if cache is not None]
    device = device_of(given[0][0])
    context = context_of(device)
    slots = _slots(context, device, batch_indices, positions, kv_indices, kv_indptr, given[0][1].shape[1])
    k, k_cache = given[0]
    v, v_cache = given[-1]
    view = folio.make_nhd_view(k_cache.unsqueeze(2), v_cache.unsqueeze(2))
    values = v.unsqueeze(1) if len(given) == 2 else None
    folio.write_kv_cache(context, folio.CacheWriteArgs(k.unsqueeze(1), values, slots, view))
