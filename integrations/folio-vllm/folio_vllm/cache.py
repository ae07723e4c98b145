"""vLLM's KV cache of a layer as Folio's view, and the layer's scales."""

from dataclasses import dataclass

import folio
import torch

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHE_DTYPES = ("auto", "float16", "bfloat16", *FP8)


def with_regular_strides(tensor):
    """The tensor itself, where dimensions of one element stride as if it were contiguous. torch leaves anything there,
    for instance with one KV head a rank, and kernels that copy 16 bytes at a time look at every stride."""
    regular, strides = 1, list(tensor.stride())
    for dimension in reversed(range(tensor.dim())):
        if tensor.shape[dimension] == 1:
            strides[dimension] = regular
        regular *= tensor.shape[dimension]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


@dataclass(frozen=True)
class CacheLayout:
    """How Folio uses a layer's cache in vLLM: [blocks, KV heads, block_size, head_size + head_size_v].

    vLLM's other parts move whole blocks, so a block's inside belongs to the backend. "strided": each token's K, then
    its V, in whatever order of dimensions vLLM chose. "cpu_packed": a head's K of the whole block, then its V in pairs
    of tokens, which is what the CPU's matrix units read.
    """

    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    page_size: int
    dtype: torch.dtype
    kv_format: str

    def view(self, kv_cache):
        """The cache as a folio.KvCacheView: nothing is copied. Raises ValueError for a tensor of another shape."""
        width = self.head_dim_qk + self.head_dim_v
        if kv_cache.dim() != 4 or tuple(kv_cache.shape[1:]) != (self.num_kv_heads, self.page_size, width):
            raise ValueError(f"kv_cache is {list(kv_cache.shape)}; this layer's is [blocks, {self.num_kv_heads}, "
                             f"{self.page_size}, {width}]")
        if kv_cache.dtype != self.dtype:
            kv_cache = kv_cache.view(self.dtype)  # fp8 caches are allocated as bytes
        kv_cache = with_regular_strides(kv_cache)
        if self.kv_format == "strided":
            return folio.make_hnd_view(kv_cache[..., :self.head_dim_qk], kv_cache[..., self.head_dim_qk:])
        block, head, token, component = kv_cache.stride()
        if (token, component) != (width, 1):
            raise ValueError("kv_cache's tokens of a head are not contiguous; packed pages need the layout LBHNC, or "
                             "additional_config={'folio': {'kv_format': 'strided'}}")
        heads = (kv_cache.shape[0], self.num_kv_heads)
        start = kv_cache.storage_offset()
        k = kv_cache.as_strided((*heads, self.page_size, self.head_dim_qk), (block, head, self.head_dim_qk, 1), start)
        v = kv_cache.as_strided((*heads, self.page_size // 2, self.head_dim_v, 2),
                                (block, head, 2 * self.head_dim_v, 2, 1), start + self.page_size * self.head_dim_qk)
        return folio.make_cpu_packed_view(k, v)


def scale_of(layer, name, num_kv_heads):
    """The scale of an fp8 cache, `name` being "k" or "v": one, or one per KV head. It is read where it lies when the
    layer runs, so that scales that are measured later, and captured graphs, follow it. Raises ValueError for another
    number of scales."""
    data = getattr(layer, f"_{name}_scale")
    if data.numel() not in (1, num_kv_heads):
        raise ValueError(f"the layer has {data.numel()} {name} scales; Folio takes 1 or {num_kv_heads}, one a KV head")
    return folio.Scale(data=data.reshape(-1), granularity="per_tensor" if data.numel() == 1 else "per_head")
