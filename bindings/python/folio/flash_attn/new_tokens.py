"""Keys and values that a call appends to its cache before it attends, rotated where it says how."""

from typing import NamedTuple

import folio
import torch

from .plans import context_of


class NewKv(NamedTuple):
    """What a call appends: k and v [..., KV heads, head_dim], and whether neighbouring components are rotated."""

    k: torch.Tensor
    v: torch.Tensor | None  # None where the cache's V is a part of its K
    interleaved: bool


class NewTokens:
    """Where a step's new tokens go, and the angles of them and of its queries."""

    def __init__(self, slots, row, offset, base):
        self.slots = slots  # int64 [new tokens], -1 for tokens of no request and beyond the cache
        self.key_angles = self.query_angles = None
        self._row = row
        self._offset = offset
        self._base = base

    @classmethod
    def of(cls, table, page_size, capacity, cached, offsets, count, base):
        """Token i of request r, at offsets[r] + i of the new ones, becomes the request's token cached[r] + i."""
        row, offset = _rows(offsets, count)
        position = cached[row] + offset
        columns = (position // page_size).clamp(0, max(table.shape[1] - 1, 0)).long()
        page = table[row, columns].long()
        inside = (position >= 0) & (position < capacity) & (offset < (offsets[1:] - offsets[:-1])[row])
        return cls(torch.where(inside, page * page_size + position % page_size, -1), row, offset, base)

    def set_rotary(self, cos, sin, cu_q, tokens, capacity, moves, head_dim):
        """cos, sin: [positions, rotary_dim / 2]. `moves`: queries stand one after the other, else all at the first."""
        if cos.shape != sin.shape or cos.dim() != 2 or cos.device != cu_q.device or sin.device != cu_q.device:
            raise ValueError(
                f"folio.flash_attn: rotary_cos is {list(cos.shape)} on {cos.device}, rotary_sin {list(sin.shape)} on "
                f"{sin.device}; both are [positions, rotary_dim / 2] on {cu_q.device}"
            )
        if 2 * cos.shape[1] > head_dim:
            raise ValueError(f"folio.flash_attn: rotary_cos rotates {2 * cos.shape[1]} components; a head has {head_dim}")
        if cos.shape[0] < capacity:
            raise ValueError(f"folio.flash_attn: rotary_cos has {cos.shape[0]} positions; the cache has room for {capacity}")
        row, offset = _rows(cu_q, tokens)
        at = self._base[row] + offset if moves else self._base[row]
        self.query_angles = _angles(cos, sin, at)
        self.key_angles = _angles(cos, sin, self._base[self._row] + self._offset)


def _rows(offsets, count):
    """(request, place in it) of each of `count` tokens at offsets [requests + 1]."""
    token = torch.arange(count, dtype=torch.int32, device=offsets.device)
    row = (torch.searchsorted(offsets, token, right=True) - 1).clamp(0, offsets.shape[0] - 2)
    return row, token - offsets[row]


def _angles(cos, sin, position):
    position = position.clamp(0, cos.shape[0] - 1)  # beyond the tables there are only tokens of no request
    return cos.detach()[position].float()[:, None, :], sin.detach()[position].float()[:, None, :]


def rotate(x, angles, interleaved):
    """x [tokens, heads, head_dim] with its first components turned: in float32, rounded once."""
    cos, sin = angles
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * cos - b * sin, a * sin + b * cos
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)


def write(layer, lengths, new, q):
    """Writes the step's new tokens into the layer's cache. Returns q, rotated where the step has angles."""
    step = lengths.new_tokens
    k = new.k.reshape(-1, *new.k.shape[-2:])
    v = None if new.v is None else new.v.reshape(-1, *new.v.shape[-2:])
    if step.key_angles is not None:
        k = rotate(k, step.key_angles, new.interleaved)
        q = rotate(q.reshape(-1, *q.shape[-2:]), step.query_angles, new.interleaved).view(q.shape)
    key = layer.family.key
    folio.write_kv_cache(context_of(key.device, key.threads), folio.CacheWriteArgs(k, v, step.slots, layer.view))
    return q
