"""attn_implementation="paged|folio": continuous batching over transformers' own slot caches, in place.

A group of layers shares the slots of its tokens. Groups of full attention give whole blocks in order: their new tokens
are written first, and the blocks are Folio's pages. Groups of a sliding window reuse the slots of tokens that leave it:
the cache is read first, slot by slot, with the new tokens as a second segment, and written afterwards.

On a GPU lengths and slots stay on the device: plans are made there, within bounds that are rounded up so that few ops
are prepared, and may be captured (`use_cuda_graph`). On a CPU they are read, and slots are checked.
"""

import weakref

import folio
import torch

from .arguments import check_call
from .paged_steps import DeviceStep, HostStep
from .plans import OpKey, count, op_of

_REASON = "Folio's paged attention is not traced; use CUDA graphs (use_cuda_graph) rather than compile configs"


@torch.compiler.disable(reason=_REASON)
def paged_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    cache=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    read_index=None,
    write_index=None,
    block_table=None,
    dropout=0.0,
    scaling=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    **extra,
):
    """An attention function of transformers' continuous batching: (out [tokens, heads, head_dim], None).

    query [1, heads, tokens, head_dim]; key, value [1, KV heads, tokens, head_dim]: all requests' new tokens in a row.
    They are written into `cache` (transformers' PagedAttentionCache). The window is the cache's, of this layer.
    """
    check_call(module, query, key, value, dropout, extra)
    if cache is None:
        raise ValueError('folio: "paged|folio" serves generate_batch alone; use attn_implementation="folio" elsewhere')
    if attention_mask is not None or block_table is not None:
        given = "attention_mask" if block_table is None else "block_table"
        raise NotImplementedError(f'folio: "paged|folio" takes no {given}; lengths and slots say it all')
    if is_causal is False or not getattr(module, "is_causal", True):
        raise NotImplementedError("folio: continuous batching is for causal attention")
    layer = _Layer.of(cache, module.layer_idx)
    q, k, v = (tensor.detach().transpose(1, 2).squeeze(0) for tensor in (query, key, value))
    lengths_k = cu_seq_lens_k[layer.kind] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    longest = max_seqlen_k[layer.kind] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    given = (cu_seq_lens_q, lengths_k, read_index[layer.group], write_index[layer.group])
    step = layer.step(given, (max_seqlen_q, longest), q.shape[0])
    op = op_of(
        OpKey(
            device=q.device,
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim_qk=q.shape[2],
            head_dim_v=v.shape[2],
            q=q.dtype,
            kv=layer.dtype,
            mask=folio.MaskKind.CAUSAL,
            window_left=layer.window_left,
            soft_cap=bool(softcap),
            sinks=s_aux is not None,
            page_size=step.page_size,
            bounds=step.bounds,
        )
    )
    planned = op.plan(step.key, lambda: (step.batch(), None))
    bound = step.bind(op, planned)
    attend = op.layer(layer.layers, layer.view(step.page_size), scaling, softcap, s_aux)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])  # rows beyond the last request are padding
    if step.writes_first:
        attend.write(bound, k, v)
        attend(bound, q, out)
    else:
        attend(bound, q, out, ragged=(k, v))
        attend.write(bound, k, v)
    op.counted()
    count(tokens_written=step.write_index.shape[0])
    return out, None


class _Group:
    """Layers that share slots, hence a step's tables and plan."""

    def __init__(self):
        self.step = None
        self.last_layer = -1


class _Layer:
    """What stays the same of one layer of a cache."""

    _of_cache = weakref.WeakKeyDictionary()

    def __init__(self, cache, groups, layer_idx):
        self.index = layer_idx
        self.group, place = cache.layer_index_to_group_indices[layer_idx]
        window = cache.sliding_windows[layer_idx]
        self.kind = "full_attention" if window == 1 else "sliding_attention"
        self.window_left = -1 if window == 1 else window - 1
        self.block_size = cache.block_size
        self.halves = cache.key_cache[place], cache.value_cache[place]
        self.dtype = self.halves[0].dtype
        self.shared = groups.setdefault(self.group, _Group())
        self.views, self.layers = {}, {}

    @classmethod
    def of(cls, cache, layer_idx):
        layers, groups = cls._of_cache.setdefault(cache, ({}, {}))
        if layer_idx not in layers:
            layers[layer_idx] = cls(cache, groups, layer_idx)
        return layers[layer_idx]

    def view(self, page_size):
        if page_size not in self.views:
            pages = (half.view(-1, page_size, *half.shape[1:]) for half in self.halves)
            self.views[page_size] = folio.make_nhd_view(*pages)
        return self.views[page_size]

    def step(self, given, longest, tokens):
        """The step that these arguments belong to: the group's last one, or a new one."""
        shared = self.shared
        if shared.step is None or not shared.step.is_that_of(given, again=self.index <= shared.last_layer):
            make = HostStep if given[0].device.type == "cpu" else DeviceStep
            shared.step = make(given, longest, tokens, self.block_size, windowed=self.window_left >= 0)
        shared.last_layer = self.index
        return shared.step
