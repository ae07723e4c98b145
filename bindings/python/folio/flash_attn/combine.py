"""flash_attn_combine: partial results of one attention, merged."""

import folio
import torch

from .arguments import FLOATS, plain
from .plans import context_of


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """(out, LSE) of out_partial [splits, batch, seqlen, heads, headdim] and lse_partial [splits, batch, seqlen, heads].

    Both may lack `batch`. The LSE is float32 [batch, heads, seqlen] transposed to [batch, seqlen, heads], natural. A
    split whose LSE is infinite contributes nothing. out_dtype: that of out_partial where it is left out.
    """
    return combine(out_partial, lse_partial, out, out_dtype)


def combine(out_partial, lse_partial, out, out_dtype):
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(f"folio.flash_attn: out_partial is {list(out_partial.shape)}, lse_partial "
                         f"{list(lse_partial.shape)}; they are [splits, batch, seqlen, heads, headdim] and the same without "
                         "headdim")
    if lse_partial.dtype != torch.float32 or out_partial.dtype not in FLOATS:
        raise ValueError(f"folio.flash_attn: out_partial is {out_partial.dtype}, lse_partial {lse_partial.dtype}; they must "
                         "be float32, float16 or bfloat16, and float32")
    if out_partial.shape[0] == 0:
        raise ValueError("folio.flash_attn: out_partial has no splits")
    out_partial, lse_partial = plain(out_partial, "out_partial"), plain(lse_partial, "lse_partial")
    *leading, heads, width = out_partial.shape[1:]
    splits = out_partial.shape[0]
    states = out_partial.reshape(splits, -1, heads, width).transpose(0, 1)  # [tokens, splits, heads, headdim]
    states_lse = lse_partial.reshape(splits, -1, heads).transpose(0, 1)
    if out is None:
        out = out_partial.new_empty((*leading, heads, width), dtype=out_dtype)
    elif tuple(out.shape) != (*leading, heads, width) or (out_dtype is not None and out.dtype != out_dtype):
        raise ValueError(f"folio.flash_attn: out is {out.dtype} {list(out.shape)}; with out_dtype {out_dtype} it must be "
                         f"{[*leading, heads, width]}")
    lse = torch.empty((*leading[:-1], heads, leading[-1]), dtype=torch.float32, device=out.device).transpose(-1, -2)
    flat = torch.empty((states.shape[0], heads), dtype=torch.float32, device=out.device)
    threads = torch.get_num_threads() if out.device.type == "cpu" else 0
    view = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    folio.merge_states(context_of(out.device, threads), folio.AttentionStatesView(states, states_lse),
                       view.view(-1, heads, width), flat)
    if view is not out:
        out.copy_(view)
    lse.copy_(flat.view(lse.shape))
    return out, lse
