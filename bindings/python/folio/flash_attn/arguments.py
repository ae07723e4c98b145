"""What the functions are given, brought to one form, or refused in one sentence."""

import operator
from typing import NamedTuple

import torch

import folio

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MOST = 2**31 - 1  # of Folio's integers; no position reaches it


class Rules(NamedTuple):
    """Which keys a query sees and how logits are made of them: what a layer keeps over all steps."""

    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    num_splits: int
    sm_margin: int
    attention_chunk: int


def rules_of(softmax_scale, causal, window_size, softcap, num_splits=0, sm_margin=0, attention_chunk=0):
    left, right = _window(window_size)
    attention_chunk = whole(attention_chunk, "attention_chunk")
    if attention_chunk < 0:
        raise ValueError(f"folio.flash_attn: attention_chunk is {attention_chunk}; it is 0 (off) or a number of tokens")
    if causal or right == 0:
        causal, right = True, 0
    if softmax_scale is not None:
        softmax_scale = float(softmax_scale)
        if softmax_scale == 0:
            raise ValueError("folio.flash_attn: softmax_scale is 0; every key would weigh the same. "
                             "None is 1 / sqrt(headdim)")
    softcap = float(softcap or 0.0)
    if softcap < 0:
        raise ValueError(f"folio.flash_attn: softcap is {softcap}; it is 0 (off) or a positive cap")
    num_splits, sm_margin = whole(num_splits, "num_splits"), whole(sm_margin, "sm_margin")
    if num_splits < 0 or sm_margin < 0:
        raise ValueError(f"folio.flash_attn: num_splits is {num_splits} and sm_margin {sm_margin}; neither is negative")
    return Rules(softmax_scale, bool(causal), left, right, softcap, min(num_splits, MOST), sm_margin,
                 min(attention_chunk, MOST))


def whole(value, name, wanted="a whole number"):
    """An int, of what is a whole number: numpy's and a tensor's too."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"folio.flash_attn: {name} is {value!r}; it must be {wanted}") from None


def _window(window_size):
    if window_size is None:
        return -1, -1
    try:
        entries = len(window_size)
    except TypeError:
        raise TypeError(f"folio.flash_attn: window_size is {window_size!r}; it is (left, right)") from None
    if entries != 2:
        raise ValueError(f"folio.flash_attn: window_size has {entries} entries; it is (left, right)")
    sides = [-1 if side is None else whole(side, "window_size") for side in window_size]
    if min(sides) < -1:
        raise ValueError(f"folio.flash_attn: window_size is ({sides[0]}, {sides[1]}); -1 is unbounded, less is not taken")
    return [-1 if side >= MOST else side for side in sides]


def refuse(**given):
    """Raises for the first argument that asks for what Folio does not offer; each is None, False or 0 where it does not."""
    for name, value in given.items():
        if value is None or value is False or (isinstance(value, (int, float)) and value == 0):
            continue
        shown = f" is {value}" if isinstance(value, (bool, int, float)) else " is given"
        raise NotImplementedError(f"folio.flash_attn: {name}{shown}; {_REFUSALS[name]}")


_REFUSALS = {
    "dropout_p": "Folio computes attention for inference, without dropout: pass 0.0",
    "gather_kv_indices": "sparse attention over chosen keys is not offered: leave it out",
    "score_mod": "scores are not changed by functions of Python: softcap, alibi_slopes and sinks are offered",
    "score_mod_bwd": "there is no backward pass: leave it out",
    "mask_mod": "masks are not functions of Python: causal and window_size are offered",
    "aux_tensors": "they belong to score_mod and mask_mod, which are not offered",
    "aux_scalars": "they belong to score_mod and mask_mod, which are not offered",
    "block_sparse_tensors": "block-sparse masks are not offered here: leave it out",
    "block_sparse_tensors_bwd": "there is no backward pass: leave it out",
    "seqlen_k_per_split": "a split has a fixed size in folio.Determinism.BATCH_INVARIANT, which this API does not say",
    "return_attn_probs": "probabilities are never stored: return_softmax_lse is offered",
    "cp_rank": "keys divided over ranks are folio.KvShard's, not this API's: pass 0",
    "cp_tot_seqused_k": "keys divided over ranks are folio.KvShard's, not this API's: leave it out",
}


def check_hints(pack_gqa, scheduler_metadata):
    """Arguments that say how the originals' kernels work, and change no result."""
    if pack_gqa is not None and not isinstance(pack_gqa, (bool, int)):
        raise TypeError(f"folio.flash_attn: pack_gqa is {pack_gqa!r}; it is None, True or False")
    if scheduler_metadata is not None and not isinstance(scheduler_metadata, (torch.Tensor, tuple)):
        raise TypeError("folio.flash_attn: scheduler_metadata is not what get_scheduler_metadata returns, but "
                        f"{type(scheduler_metadata).__name__}")


def one_of(first_name, first, second_name, second):
    """The value of an argument that two versions name differently."""
    if first is not None and second is not None and first is not second:
        raise ValueError(f"folio.flash_attn: {first_name} and {second_name} are two names of one argument; give one")
    return second if first is None else first


def unpacked(packed, dim, name, count):
    """The `count` tensors that lie in one: q, k and v, or k and v."""
    if packed.dim() != dim + 3 or packed.shape[dim] != count:
        leading = "[batch, seqlen, " if dim == 2 else "[total, "
        raise ValueError(f"folio.flash_attn: {name} is {list(packed.shape)}; it must be {leading}{count}, heads, headdim]")
    return packed.unbind(dim)


def plain(tensor, name):
    """The tensor without a gradient, its last dimension contiguous."""
    if tensor.requires_grad:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"folio.flash_attn: {name} requires a gradient, which Folio does not compute; "
                                      "run under torch.no_grad() or torch.inference_mode()")
        tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_heads(q, k, v):
    """Raises unless q, k and v [..., heads, head_dim] belong together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS and tensor.dtype not in FP8:
            raise ValueError(f"folio.flash_attn: {name} is {tensor.dtype}; offered are float32, float16, bfloat16, "
                             "float8_e4m3fn and float8_e5m2")
        if tensor.device != q.device:
            raise ValueError(f"folio.flash_attn: {name} lies on {tensor.device}, q on {q.device}")
    if k.dtype != v.dtype:
        raise ValueError(f"folio.flash_attn: k is {k.dtype}, v {v.dtype}; they have one dtype")
    if k.shape[-2] != v.shape[-2] or k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"folio.flash_attn: k is {list(k.shape)}, v {list(v.shape)}; they differ in head_dim alone")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"folio.flash_attn: q has head_dim {q.shape[-1]}, k {k.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"folio.flash_attn: q has {q.shape[-2]} heads; a multiple of k's {k.shape[-2]} is needed")


def require_tensor(value, name):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"folio.flash_attn: {name} is of type {type(value).__name__}; it must be a tensor")


def lengths(tensor, name, entries, device):
    """int32 lengths, contiguous."""
    require_tensor(tensor, name)
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1 or tensor.shape[0] != entries:
        raise ValueError(f"folio.flash_attn: {name} is {tensor.dtype} {list(tensor.shape)}; it must be int32 [{entries}]")
    if tensor.device != device:
        raise ValueError(f"folio.flash_attn: {name} lies on {tensor.device}, q on {device}")
    return tensor.to(torch.int32).contiguous()


class PerLayer(NamedTuple):
    """A layer's arrays by head: float32 on q's device."""

    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    def key(self):
        """What tells one layer's arrays from another's. Slopes and sinks may be copied, hence their versions.

        Descales are read where they lie, or copied by each call. The layer keeps them, so an address is theirs.
        """
        copied = (None if t is None else (id(t), t.data_ptr(), version_of(t)) for t in self[:2])
        read = (None if t is None else (t.data_ptr(), t.shape, t.stride()) for t in self[2:])
        return (*copied, *read)

    def has_versions(self):
        """Whether a layer of them can be found again."""
        return not any(t is not None and t.is_inference() for t in self[:2])


def version_of(tensor):
    """Counts what is written into the tensor; a new object, equal to no other, where torch does not count."""
    return object() if tensor.is_inference() else tensor._version


def per_layer(alibi_slopes=None, sinks=None, q_descale=None, k_descale=None, v_descale=None):
    """None where no array is given, which is the common case."""
    if alibi_slopes is None and sinks is None and q_descale is None and k_descale is None and v_descale is None:
        return None
    return PerLayer(alibi_slopes, sinks, q_descale, k_descale, v_descale)


def slopes_of(slopes, q):
    """Folio's slopes, one a q head, of slopes [heads] or [batch, heads] that say the same for every request."""
    if slopes is None:
        return None
    if slopes.dim() == 2 and (slopes.shape[0] == 1 or slopes.stride(0) == 0):
        slopes = slopes[0]
    if slopes.dim() == 2:
        raise NotImplementedError("folio.flash_attn: alibi_slopes has a row for each request; one slope a head is offered")
    return by_head(slopes, q, "alibi_slopes", (torch.float32,))


def by_head(array, q, name, dtypes=FLOATS):
    if array is None:
        return None
    heads = q.shape[-2]
    if array.dtype not in dtypes or tuple(array.shape) != (heads,) or array.device != q.device:
        raise ValueError(f"folio.flash_attn: {name} is {array.dtype} {list(array.shape)} on {array.device}; it must be "
                         f"{' or '.join(str(dtype) for dtype in dtypes)} [{heads}] on {q.device}")
    return plain(array, name).float().contiguous()


def scale_of(descale, tensor, name, requests, heads):
    """A folio.Scale of descale [batch, KV heads] of any strides, or 1."""
    if descale is None:
        return 1.0
    if descale.dtype != torch.float32 or tuple(descale.shape) != (requests, heads) or descale.device != tensor.device:
        raise ValueError(f"folio.flash_attn: {name} is {descale.dtype} {list(descale.shape)} on {descale.device}; it must "
                         f"be float32 [{requests}, {heads}] on {tensor.device}")
    descale = descale.detach()
    kinds = folio.ScaleGranularity
    if requests == 0 or descale.stride() == (0, 0) or requests * heads == 1:
        return folio.Scale(data=descale.reshape(-1)[:1] if requests == 0 else descale[:1, 0], granularity=kinds.PER_TENSOR)
    if descale.stride() == (1, 0):
        return folio.Scale(data=descale[:, 0], granularity=kinds.PER_REQUEST)
    return folio.Scale(data=descale if descale.stride(1) == 1 else descale.contiguous(),
                       granularity=kinds.PER_REQUEST_AND_HEAD)


def is_read_in_place(descale):
    """Whether scale_of makes no copy, which would not have what is written into descale later."""
    if descale.dim() != 2 or descale.numel() <= 1 or descale.is_contiguous():
        return True
    return descale.stride(1) == 1 or descale.stride() in ((0, 0), (1, 0))
