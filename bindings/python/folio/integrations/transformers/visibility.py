"""Which keys each query of a padded batch sees: transformers' masks in, what Folio plans out.

Transformers describes visibility by masks over a padded [batch, query, key] box. Folio takes lengths, positions, a
window and, where those are not enough, bits. `find_visibility` translates, exactly: a mask becomes lengths and a window
only where they say the same of every (query, key) pair.
"""

import dataclasses
import functools
import threading

import numpy as np
import torch

# exp() of a logit this far below the others is 0 in float32: additive masks hide a key by this or less.
HIDDEN_BELOW = -1e4


class VisibleRanges(torch.Tensor):
    """A mask that `ranges_mask` made: int32 [batch, 1, queries, 3] on the host.

    Its last dimension is (first, end, keys): query i sees the keys [first, end) of the `keys` that the mask is for. An
    empty range is a query that is padding. It has four dimensions so that transformers passes it on as it is.
    """


@dataclasses.dataclass(frozen=True)
class Visibility:
    """One step's visibility. Arrays are int64 [batch]; key indices count from the first key of the padded box.

    Of request b, queries [q_start, q_start + q_len) are computed; they see keys of [kv_start, kv_start + kv_len). The
    first of them stands at position q_first_pos, kv_start being position 0. The other queries see nothing.
    """

    q_length: int
    kv_length: int
    q_start: np.ndarray
    q_len: np.ndarray
    kv_start: np.ndarray
    kv_len: np.ndarray
    q_first_pos: np.ndarray
    causal: bool
    window_left: int = -1
    bits: np.ndarray | None = None  # bool [batch, queries, keys]; then every query and key is computed

    @functools.cached_property
    def packed_bits(self):
        """uint8 [batch, bytes]: each request's block as Folio's custom masks have it."""
        return np.packbits(self.bits.reshape(len(self.bits), -1), axis=1, bitorder="little")

    @functools.cached_property
    def key(self):
        """Equal keys: equal plans."""
        arrays = (self.q_start, self.q_len, self.kv_start, self.kv_len, self.q_first_pos)
        return self.q_length, self.kv_length, b"".join(array.tobytes() for array in arrays), self.bits is not None

    def without_first(self, hidden):
        """The same over keys of which each request's first `hidden`, int64 [batch], are left out."""
        if not hidden.any():
            return self
        if self.bits is None:
            shown = (self.kv_len > 0) & (self.kv_start < hidden)
        else:
            gone = np.arange(self.kv_length) < hidden[:, None]
            shown = (self.bits & gone[:, None]).any((1, 2))
        if shown.any():
            raise ValueError("attention_mask shows keys that were padding when the FolioCache stored the first tokens")
        if self.bits is None:
            return dataclasses.replace(self, kv_start=np.maximum(self.kv_start - hidden, 0))
        moved = [np.roll(bits & ~gone, -count, axis=1) for bits, gone, count in zip(self.bits, gone, hidden)]
        return dataclasses.replace(self, bits=np.stack(moved))

    def from_multiples_of(self, size):
        """The same with every kv_start a multiple of `size`: a window hides the keys before, or bits do."""
        before = self.kv_start % size
        if not before.any():
            return self
        window = self.window_left
        if window < 0 and self.causal and (self.q_len <= 1).all():
            window = int(self.q_first_pos.max())  # one query a request, that sees them all
        hidden = self.q_first_pos - window >= 0
        if self.bits is not None or window < 0 or not self.causal or not (hidden | (before == 0)).all():
            return self.with_bits()
        return dataclasses.replace(
            self,
            kv_start=self.kv_start - before,
            kv_len=np.where(self.kv_len > 0, self.kv_len + before, 0),
            q_first_pos=self.q_first_pos + before,
            window_left=window,
        )

    def with_bits(self):
        """The same visibility said by bits alone."""
        if self.bits is not None:
            return self
        query = np.arange(self.q_length)[None, :, None] - self.q_start[:, None, None]
        key = np.arange(self.kv_length)[None, None, :] - self.kv_start[:, None, None]
        stand = query + self.q_first_pos[:, None, None]
        visible = (query >= 0) & (query < self.q_len[:, None, None]) & (key >= 0) & (key < self.kv_len[:, None, None])
        if self.causal:
            visible &= key <= stand
        if self.window_left >= 0:
            visible &= key >= stand - self.window_left
        return _with_bits(visible)


def make_ranges(batch, q_length, kv_length, *, q_offset=0, kv_offset=0, causal, window=None, padding=None):
    """Visible ranges as int64 [batch, queries, 2], or None where a request's keys have holes.

    Queries stand at q_offset on, keys at kv_offset on. `padding` is bool [batch or 1, positions], true for tokens;
    beyond its end there are no keys. Under `causal` queries that are padding themselves see nothing: nobody reads
    their output. `window` counts the query itself.
    """
    keys = np.zeros((batch, 2), np.int64)
    keys[:, 1] = kv_length
    positions = q_offset + np.arange(q_length)
    is_token = np.ones((batch, q_length), bool)
    if padding is not None:
        held = np.broadcast_to(padding, (batch, padding.shape[1]))
        tokens = held[:, kv_offset : kv_offset + kv_length]
        keys = _runs(tokens)
        if keys is None:
            return None
        inside = positions < held.shape[1]
        if causal:
            is_token[:, inside] = held[:, positions[inside]]
    ranges = np.empty((batch, q_length, 2), np.int64)
    ranges[..., 0] = keys[:, :1]
    ranges[..., 1] = keys[:, 1:]
    if causal:
        ranges[..., 1] = np.minimum(ranges[..., 1], positions + 1 - kv_offset)
        if window is not None:
            ranges[..., 0] = np.maximum(ranges[..., 0], positions + 1 - window - kv_offset)
    ranges[~is_token | (ranges[..., 1] <= ranges[..., 0])] = 0
    return ranges


def find_visibility(mask, batch, q_length, kv_length, *, causal, window):
    """The Visibility of a mask as transformers passes it to an attention function.

    mask: VisibleRanges; bool or additive [batch or 1, heads or 1, queries, keys]; bool or integer [batch, keys] with 0
    for padding; or None: everything, or under `causal` keys up to the query, the last query standing at the last key.
    A mask of four dimensions is the whole truth, as for transformers' own eager attention: `causal` and `window` then
    say nothing. Raises ValueError for what is no visibility: additive biases, masks that differ by head.
    """
    if isinstance(mask, VisibleRanges):
        ranges = mask.as_subclass(torch.Tensor).cpu().numpy()[:, 0].astype(np.int64)
        if ranges.shape[:2] != (batch, q_length) or (ranges[..., 2] != kv_length).any():
            given = f"{ranges.shape[0]} x {ranges.shape[1]} queries and {ranges[..., 2].max()} keys"
            _refuse_shape(given, batch, q_length, kv_length)
        key = ("ranges", batch, q_length, ranges.tobytes())
        return _remembered(key, lambda: _from_ranges(ranges[..., :2], kv_length))
    if mask is None or mask.dim() == 2:
        padding = None if mask is None else mask.cpu().numpy().astype(bool)
        if padding is not None and padding.shape != (batch, kv_length):
            _refuse_shape(f"shape {list(mask.shape)}", batch, q_length, kv_length)
        key = ("lengths", batch, q_length, kv_length, causal, window, None if padding is None else padding.tobytes())
        return _remembered(key, lambda: _from_padding(padding, batch, q_length, kv_length, causal, window))
    visible = _to_bool(mask, batch, q_length, kv_length)
    return _remembered(("bits", visible.tobytes(), visible.shape), lambda: _from_bools(visible))


class _Kept(threading.local):
    def __init__(self):
        self.answers = {}


_kept = _Kept()
_MOST_KEPT = 8


def _remembered(key, make):
    """All layers of a step ask the same: what is remembered is found by what the mask holds, so it is never stale."""
    answers = _kept.answers
    if key not in answers:
        found = make()
        if len(answers) >= _MOST_KEPT:
            del answers[next(iter(answers))]
        answers[key] = found
    return answers[key]


def _refuse_shape(given, batch, q_length, kv_length):
    raise ValueError(
        f"attention_mask has {given}; the layer has {batch} x {q_length} queries and {kv_length} keys: does the model "
        "change its keys after the cache, or does the mask belong to another step?"
    )


def _runs(tokens):
    """(first, end) of each row's true entries; None if a row has a hole."""
    count = tokens.sum(1)
    first = tokens.argmax(1) if tokens.shape[1] else np.zeros(len(tokens), np.int64)
    first = np.where(count > 0, first, 0)
    end = first + count
    inside = np.arange(tokens.shape[1])
    if (tokens != ((inside >= first[:, None]) & (inside < end[:, None]))).any():
        return None
    return np.stack([first, end], 1)


def _to_bool(mask, batch, q_length, kv_length):
    """bool [batch, queries, keys] of a mask of four dimensions."""
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; two or four dimensions are taken")
    if mask.shape[2] != q_length or mask.shape[3] != kv_length or mask.shape[0] not in (1, batch):
        _refuse_shape(f"shape {list(mask.shape)}", batch, q_length, kv_length)
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise ValueError(f"attention_mask is {mask.dtype}; of four dimensions it is bool or additive")
        visible = mask == 0
        if not (visible | (mask <= HIDDEN_BELOW)).all():
            raise ValueError(
                "attention_mask adds a bias; Folio takes masks of 0 (visible) and the dtype's minimum or -inf (hidden)"
            )
        mask = visible
    if mask.shape[1] > 1 and not (mask == mask[:, :1]).all():
        raise ValueError("attention_mask differs from head to head; Folio's custom masks are the same for all heads")
    return np.ascontiguousarray(np.broadcast_to(mask[:, 0].cpu().numpy(), (batch, q_length, kv_length)))


def _from_padding(padding, batch, q_length, kv_length, causal, window):
    offset = kv_length - q_length
    ranges = make_ranges(batch, q_length, kv_length, q_offset=offset, causal=causal, window=window, padding=padding)
    if ranges is not None:
        return _from_ranges(ranges, kv_length)
    ranges = make_ranges(batch, q_length, kv_length, q_offset=offset, causal=causal, window=window)
    return _with_bits(_bits_of(ranges, kv_length) & padding[:, None, :])


def _from_bools(visible):
    count = visible.sum(-1)
    first = visible.argmax(-1)
    end = visible.shape[-1] - visible[..., ::-1].argmax(-1)
    seen = count > 0
    if (seen & (count != end - first)).any():
        return _with_bits(visible)
    return _from_ranges(np.where(seen[..., None], np.stack([first, end], -1), 0), visible.shape[-1])


def _from_ranges(ranges, kv_length):
    found = _fit(ranges[..., 0], ranges[..., 1], kv_length)
    return _with_bits(_bits_of(ranges, kv_length)) if found is None else found


def _fit(first, end, kv_length):
    """Lengths, positions and a window that say the same as the ranges, or None.

    Query i stands at position p + i, p being chosen so that the first query's range ends with its own position. Then
    ranges must end at min(keys' end, p + i + 1) and begin at max(keys' first, p + i - window_left), for one window.
    """
    batch, q_length = first.shape
    seen = end > first
    count = seen.sum(1)
    start = seen.argmax(1)
    index = np.arange(q_length)
    if (seen != ((index >= start[:, None]) & (index < (start + count)[:, None]))).any():
        return None
    rows = np.arange(batch)
    last = np.maximum(start + count - 1, 0)
    some = count > 0
    kv_first = np.where(some, np.where(seen, first, kv_length).min(1), 0)
    kv_end = np.where(some, np.where(seen, end, 0).max(1), 0)
    p = end[rows, start] - 1 - start
    stand = p[:, None] + index
    if (seen & (end != np.minimum(kv_end[:, None], stand + 1))).any():
        return None
    bound = some & (first[rows, last] > kv_first)
    windows = np.unique((p + last - first[rows, last])[bound])
    if len(windows) > 1:
        return None
    window_left = int(windows[0]) if len(windows) else -1
    lowest = stand - window_left if window_left >= 0 else np.zeros_like(stand)
    if (seen & (first != np.maximum(kv_first[:, None], lowest))).any():
        return None
    everything = window_left < 0 and not (seen & (end != kv_end[:, None])).any()
    return Visibility(
        q_length=q_length,
        kv_length=kv_length,
        q_start=np.where(some, start, 0),
        q_len=count,
        kv_start=kv_first,
        kv_len=kv_end - kv_first,
        q_first_pos=np.where(some, end[rows, start] - 1 - kv_first, 0),
        causal=not (everything and count.max(initial=0) > 1),
        window_left=window_left,
    )


def _bits_of(ranges, kv_length):
    keys = np.arange(kv_length)
    return (keys >= ranges[..., :1]) & (keys < ranges[..., 1:])


def _with_bits(visible):
    batch, q_length, kv_length = visible.shape
    zeros, queries, keys = (np.full(batch, value, np.int64) for value in (0, q_length, kv_length))
    return Visibility(q_length, kv_length, zeros, queries, zeros, keys, zeros, causal=False, bits=visible)
