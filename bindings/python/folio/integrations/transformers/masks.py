"""The mask function of "folio": what transformers calls once a step and kind of layer, before the layers run."""

import torch
from transformers import masking_utils

from .visibility import VisibleRanges, make_ranges

_CAUSAL = masking_utils.causal_mask_function
_BIDIRECTIONAL = masking_utils.bidirectional_mask_function
_SLIDING = masking_utils.sliding_window_causal_mask_function(1)
_OVERLAY = masking_utils.sliding_window_overlay(1)


@torch.compiler.disable(reason="Folio plans on the host from what masks hold; torch.compile takes it as a break in the graph")
def ranges_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=_CAUSAL,
    attention_mask=None,
    device="cpu",
    **rest,
):
    """VisibleRanges of causal, sliding-window and plain attention over padded requests, without a [queries, keys] box.

    Any other mask function, and padding that leaves holes between a request's keys, become transformers' own bool mask
    of four dimensions. Reads `attention_mask` on the host: on a GPU that waits, once a step.
    """
    if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            'attn_implementation="folio" reads masks on the host, so its steps cannot be captured in a CUDA graph; '
            'generate_batch with "paged|folio" can'
        )
    causal, window, known = _read(mask_function)
    if known:
        padding = None if attention_mask is None else attention_mask.cpu().numpy().astype(bool)
        ranges = make_ranges(
            batch_size,
            q_length,
            kv_length,
            q_offset=int(q_offset),
            kv_offset=int(kv_offset),
            causal=causal,
            window=window,
            padding=padding,
        )
        if ranges is not None:
            mask = torch.full((batch_size, 1, q_length, 3), kv_length, dtype=torch.int32)
            mask[:, 0, :, :2] = torch.from_numpy(ranges)
            return mask.as_subclass(VisibleRanges)
    rest.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **rest,
    )


def _read(mask_function):
    """(causal, window, whether it is known that it is no more than that)."""
    if mask_function is _CAUSAL:
        return True, None, True
    if mask_function is _BIDIRECTIONAL:
        return False, None, True
    window = _window_of(mask_function)
    return True, window, window is not None


def _window_of(mask_function):
    """The window of what sliding_window_causal_mask_function made, told by its code; None for other functions."""
    parts = _closure(mask_function, _SLIDING)
    if parts is None or len(parts.get("mask_functions", ())) != 2 or parts["mask_functions"][1] is not _CAUSAL:
        return None
    overlay = _closure(parts["mask_functions"][0], _OVERLAY)
    window = None if overlay is None else overlay.get("sliding_window")
    return window if isinstance(window, int) else None


def _closure(function, like):
    """What a function of the same code as `like` has closed over, by name."""
    code = getattr(function, "__code__", None)
    if code is not like.__code__:
        return None
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
