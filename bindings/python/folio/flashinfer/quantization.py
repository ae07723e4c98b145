"""Bits of masks (flashinfer.quantization)."""

import numpy as np
import torch

from . import arguments


def _low_first(bitorder):
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder must be 'big' or 'little', got {bitorder!r}")
    return bitorder == "little"


def packbits(x, bitorder="big"):
    """bool [bits] as uint8 [ceil(bits / 8)], the first bit highest, or lowest with "little". Padding bits are 0."""
    if not _low_first(bitorder):
        bits = torch.nn.functional.pad(x.reshape(-1).bool(), (0, -x.numel() % 8))
        x = bits.view(-1, 8).flip(1)
    return arguments.pack_bits(x)


def segment_packbits(x, indptr, bitorder="big"):
    """packbits of segments x[indptr[i]:indptr[i + 1]], each from a byte of its own: (bytes, their offsets [n + 1])."""
    lengths = np.diff(arguments.to_host(indptr)[0])
    packed, starts = arguments.pack_segments(x, lengths, low_first=_low_first(bitorder))
    return packed, torch.as_tensor(starts, dtype=indptr.dtype, device=indptr.device)
