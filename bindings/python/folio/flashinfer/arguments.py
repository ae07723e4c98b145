"""What FlashInfer's functions take in common: dtypes, layouts, caches, position encodings, arguments that are hints.

A hint is about the original's kernels and changes no result: it is checked for being a known one, and has no effect
here.
"""

import functools
import math

import numpy as np
import torch

from .. import _folio as folio

BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "cute-dsl", "cutile", "trtllm-gen", "trtllm-native", "fmha_v2",
            "xqa", "cake", "cuda", "prims_ts", "cute-dsl-monolithic", "cute-dsl-modular")
LSE_BASES = {"log2": "two", "ln": "e"}
ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")


def check_backend(backend):
    """A hint: which of the original's kernels. Folio picks its own."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; the original's are {', '.join(BACKENDS)}")


def is_hnd(kv_layout):
    """Whether heads stand before tokens."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}; it is NHD or HND")
    return kv_layout == "HND"


def check_encoding(pos_encoding_mode):
    if pos_encoding_mode not in ENCODINGS:
        raise KeyError(f"Invalid pos_encoding_mode {pos_encoding_mode}; it is one of {', '.join(ENCODINGS)}")
    return pos_encoding_mode


def lse_base(name):
    if name not in LSE_BASES:
        raise ValueError(f"lse_base must be one of {tuple(LSE_BASES)}, got {name!r}")
    return LSE_BASES[name]


def check_lse_layout(name):
    if name not in ("NH", "HN"):
        raise ValueError(f"lse_layout must be one of ('NH', 'HN'), got {name!r}")


def refuse(why="Folio has no kernel for it", **given):
    """Raises NotImplementedError for the first of these arguments that is given."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is given; it is not offered: {why}")


NO_NVFP4 = "NVFP4 caches are not read here; dequantize them, or keep fp8"
NO_SKIP = "skipping parts of the softmax changes results; attention here is exact"


def torch_dtype(dtype, default=None):
    """A torch dtype, or the name of one."""
    if dtype is None:
        return default
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a string or torch.dtype, got {dtype!r}")
    return dtype


def to_host(*tensors):
    """int32 numpy arrays of tensors on any device, with one wait for all that lie on a GPU."""
    on_gpu = [t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
    if len(on_gpu) > 1:
        together = torch.cat([t.reshape(-1).to(torch.int32) for t in on_gpu]).cpu().numpy()
        parts = iter(np.split(together, np.cumsum([t.numel() for t in on_gpu])[:-1]))
        return [next(parts).reshape(t.shape) if any(t is g for g in on_gpu) else _to_numpy(t) for t in tensors]
    return [_to_numpy(t) for t in tensors]


def _to_numpy(tensor):
    if tensor is None:
        return None
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().numpy()
    array = np.asarray(tensor)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths and offsets are integers, got {array.dtype}")
    return np.ascontiguousarray(array, np.int32)


def on_device(ids, device):
    """Page ids or offsets as int32 on the device: the tensor itself where it is that already."""
    if not isinstance(ids, torch.Tensor):
        ids = torch.as_tensor(np.ascontiguousarray(ids))
    return ids.to(device=device, dtype=torch.int32, non_blocking=True)


def cache_of(paged_kv_cache):
    """A cache as `split_cache` takes it: a tensor, or a tuple of two."""
    return paged_kv_cache if type(paged_kv_cache) is torch.Tensor or type(paged_kv_cache) is tuple else _checked(paged_kv_cache)


def _checked(paged_kv_cache):
    if isinstance(paged_kv_cache, (tuple, list)):
        return tuple(paged_kv_cache)
    if not isinstance(paged_kv_cache, torch.Tensor):
        raise KeyError(f"Unrecognized paged_kv_cache type {type(paged_kv_cache)}, expect a tensor or a pair of them")
    return paged_kv_cache


def split_cache(paged_kv_cache, hnd):
    """K and V [pages, ., ., head_dim] of a pair, or of one tensor [pages, 2, ., ., head_dim]. Pages of one token may
    lack their dimension."""
    if isinstance(paged_kv_cache, (tuple, list)):
        k, v = paged_kv_cache
        if k.dim() == 3:
            at = 2 if hnd else 1
            return k.unsqueeze(at), v.unsqueeze(at)
        if k.dim() != 4 or v.dim() != 4:
            raise ValueError(f"paged_kv_cache is a pair of {k.dim()}-D and {v.dim()}-D tensors; they are 4-D")
        return k, v
    paged_kv_cache = _checked(paged_kv_cache)
    if paged_kv_cache.dim() == 4:
        paged_kv_cache = paged_kv_cache.unsqueeze(3 if hnd else 2)
    if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
        raise ValueError(f"paged_kv_cache has shape {tuple(paged_kv_cache.shape)}; it is [pages, 2, ., ., head_dim]")
    return paged_kv_cache.unbind(1)


def token_major(tensor, hnd):
    """Keys or values of one sequence as [tokens, heads, head_dim]."""
    return tensor.transpose(0, 1) if hnd else tensor


@functools.cache
def alibi_slopes(num_heads, device):
    """FlashInfer's: powers of 2^(-8 / n) for n heads, n a power of two; the odd powers of its root for heads beyond."""
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def pack_bits(x):
    """bool [bits] as uint8 bytes, the first bit lowest. Integers are true where they are not 0."""
    bits = x.reshape(-1).bool().to(torch.uint8)
    rest = -bits.numel() % 8
    if rest:
        bits = torch.nn.functional.pad(bits, (0, rest))
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(1, dtype=torch.uint8)


def pack_segments(x, lengths, offsets=None, low_first=True):
    """bool [sum of lengths] as bytes: each segment from a byte of its own. lengths: numpy, of the segments."""
    lengths = np.asarray(lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum((lengths + 7) // 8)])
    total = int(lengths.sum())
    if x.numel() != total:
        raise ValueError(f"the mask has {x.numel()} entries; the batch needs {total}")
    place = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(starts[:-1] * 8, lengths)
    spread = torch.zeros(int(starts[-1]) * 8, dtype=torch.bool, device=x.device)
    spread[torch.as_tensor(place, device=x.device)] = x.reshape(-1).bool()
    if not low_first:
        spread = spread.view(-1, 8).flip(1)
    return pack_bits(spread), starts


def plain(tensor):
    """A parameter without its gradient, where no gradients are recorded: Folio computes none, and refuses it elsewhere."""
    if tensor is not None and tensor.requires_grad:
        if torch.is_grad_enabled():
            raise folio.InvalidArgument("sinks require a gradient (requires_grad), which Folio does not compute: run under "
                                        "torch.no_grad(), or detach them")
        return tensor.detach()
    return tensor
