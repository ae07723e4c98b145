"""A transformers cache whose layers hold Folio's pages, so that nothing is concatenated and AMX can run."""

import math

import folio
import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .layouts import Layout
from .plans import context_of, count


class FolioCache(Cache):
    """For generate(past_key_values=FolioCache()) and forward calls with attn_implementation="folio".

    Each layer's keys and values lie in pages of the format and page size that run fastest on the device
    (folio.recommended_kv_format): on a CPU with 16-bit models packed, as the AMX kernel wants them. New tokens are
    written in place; memory doubles when it is full. Left padding is not stored. Sliding-window layers keep all tokens.
    Other attention implementations cannot read the pages: update() then raises at the second step.
    """

    def __init__(self):
        super().__init__(layer_class_to_replicate=PagedLayer)


class PagedLayer(CacheLayerMixin):
    """One layer's pages. Every sequence has the same number of pages, one after the other.

    update() does not know which tokens are padding, the attention function does: it is what writes them.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.length = 0
        self.capacity = 0  # tokens of one sequence
        self.unwritten = None  # the last keys and values
        self.left_padding = None  # int64 [batch]: tokens that are not stored

    def lazy_initialization(self, key_states, value_states):
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch, self.num_kv_heads, _, self.head_dim_qk = key_states.shape
        self.head_dim_v = value_states.shape[3]
        config = folio.AttentionConfig(
            num_q_heads=self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            q=self.dtype,
            kv=self.dtype,
        )
        advice = folio.recommended_kv_format(config, context_of(self.device))
        self.kv_format, self.page_size = advice.format, advice.page_size
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Returns the new tokens, the keys with this layer as `folio_pages` for the attention function."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.unwritten is not None:
            raise RuntimeError('folio: a FolioCache needs attn_implementation="folio", which stores the last tokens')
        if key_states.shape[0] != self.batch:
            raise ValueError(f"the cache holds {self.batch} sequences; {key_states.shape[0]} were given")
        self.unwritten = key_states.detach(), value_states.detach()
        self.length += key_states.shape[2]
        keys = key_states.view_as(key_states)
        keys.folio_pages = self
        return keys, value_states

    @property
    def num_pages(self):
        """Pages of all sequences, used or not."""
        return self.view.num_pages if self.capacity else 0

    def layout(self, query, visible):
        """The step's requests, once its new tokens are written."""
        if self.unwritten is not None:
            self._write(visible)
        return PageLayout(self, query, visible.without_first(self.left_padding))

    def _write(self, visible):
        tokens = self.unwritten[0].shape[2]
        begin = self.length - tokens
        if begin == 0:
            self.left_padding = visible.kv_start
        self._reserve(self.length)
        at = begin + np.arange(tokens) - self.left_padding[:, None]
        slots = np.where(at < 0, -1, np.arange(self.batch)[:, None] * self.capacity + at).reshape(-1)
        new = (half.transpose(1, 2).flatten(0, 1) for half in self.unwritten)
        folio.write_kv_cache(
            context_of(self.device), folio.CacheWriteArgs(*new, torch.from_numpy(slots).to(self.device), self.view)
        )
        self.unwritten = None
        count(tokens_written=int((at >= 0).sum()))

    def _reserve(self, length):
        if length <= self.capacity:
            return
        pages = math.ceil(max(length, 2 * self.capacity) / self.page_size)
        heads, size = self.num_kv_heads, self.page_size
        packed = self.kv_format == folio.KvFormat.CPU_PACKED
        v_shape = (size // 2, self.head_dim_v, 2) if packed else (size, self.head_dim_v)
        old = self.keys, self.values
        self.keys = torch.zeros(self.batch, pages, heads, size, self.head_dim_qk, dtype=self.dtype, device=self.device)
        self.values = torch.zeros(self.batch, pages, heads, *v_shape, dtype=self.dtype, device=self.device)
        if self.capacity:
            for new, held in zip((self.keys, self.values), old):
                new[:, : held.shape[1]] = held
        self.capacity = pages * size
        self._look()

    def _look(self):
        make = folio.make_cpu_packed_view if self.kv_format == folio.KvFormat.CPU_PACKED else folio.make_hnd_view
        self.view = make(self.keys.flatten(0, 1), self.values.flatten(0, 1))
        self.layers = {}  # those that are bound to this view

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return -1

    def reset(self):
        self.length, self.unwritten = 0, None

    def crop(self, tokens_to_remove):
        """Forgets the last tokens; a positive number is transformers' old meaning, the length to keep."""
        keep = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = max(min(keep, self.length), 0)

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices):
        if self.is_initialized:
            self._replace(lambda half: half[indices.to(half.device)], self.left_padding[indices.cpu().numpy()])

    def batch_repeat_interleave(self, repeats):
        if self.is_initialized:
            self._replace(lambda half: half.repeat_interleave(repeats, dim=0), self.left_padding.repeat(repeats))

    def _replace(self, change, left_padding):
        self.keys, self.values, self.left_padding = change(self.keys), change(self.values), left_padding
        self.batch = self.keys.shape[0]
        self._look()

    def offload(self):
        raise NotImplementedError("folio: a FolioCache is not offloaded")


class PageLayout(Layout):
    """Requests over the pages of a PagedLayer.

    Requests begin with a page: a window hides the keys before the first visible one, or mask bits do.
    """

    source = folio.KvSource.PAGED

    def __init__(self, layer, query, visible):
        visible = visible.from_multiples_of(layer.page_size)
        super().__init__(visible, 1, layer.capacity)
        self.layer = layer
        self.page_size, self.kv_format = layer.page_size, layer.kv_format
        self.num_kv_heads = layer.num_kv_heads
        self.q = query.transpose(1, 2).flatten(0, 1)
        self.batch, self.q_length = query.shape[0], query.shape[2]

    def facts(self, start):
        pages = np.arange(-(-int(start[-1]) // self.page_size), dtype=np.int32)
        table = pages, (-(-start // self.page_size)).astype(np.int32)
        if self.q.device.type != "cpu":
            table = (torch.from_numpy(part).to(self.q.device) for part in table)
        return folio.csr_table(*table)

    @property
    def cache(self):
        return self.layer.view

    def unfold(self, out):
        return out.view(self.batch, self.q_length, *out.shape[1:])
