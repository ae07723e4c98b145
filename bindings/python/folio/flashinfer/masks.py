"""FlashInfer's masks: ranges as the core's spans, and packed bits where a query sees two intervals of keys.

Bits take q_len * kv_len / 8 bytes a request. Spans take two numbers a query.
"""

import numpy as np
import torch

from . import arguments

NO_KEY = 2**31 - 1  # no key stands there


def byte_offsets(lengths):
    """Where each request's bits begin, [requests + 1], int32. lengths: entries of each request."""
    return np.concatenate([[0], np.cumsum((np.asarray(lengths, np.int64) + 7) // 8)]).astype(np.int32)


def _positions(q_len, kv_len, device):
    """Positions of a request's queries [q_len, 1] and keys [1, kv_len]."""
    queries = torch.arange(kv_len - q_len, kv_len, device=device)
    return queries[:, None], torch.arange(kv_len, device=device)[None, :]


def token_places(q_lens, kv_lens, num_tokens):
    """(limits [num_tokens, 2], ahead [num_tokens]), int32 on the host, for spans_of and are_apart.

    limits: the most that a range's first and last key may be. ahead: the first key behind the query's position. Tokens
    behind the requests' are padding, whose ranges are empty.
    """
    limits = np.full((num_tokens, 2), (NO_KEY, -1), np.int32)
    ahead = np.zeros(num_tokens, np.int32)
    real = int(q_lens.sum())
    limits[:real, 1] = np.repeat(kv_lens - 1, q_lens)
    positions = np.arange(real) + np.repeat(kv_lens - np.cumsum(q_lens), q_lens)
    ahead[:real] = np.maximum(positions + 1, 0)
    return torch.from_numpy(limits), torch.from_numpy(ahead)


def spans_of(ranges, limits):
    """Begin and end of ranges [tokens, 2], which have the first and the last key, or -1 twice. Spans end at the last
    key: one that is all behind it is empty, as it shows nothing."""
    spans = torch.minimum(ranges, limits)
    spans[:, 1] += 1
    return spans.clamp_(min=0)


def are_apart(spans, ahead, causal_window_left, range_window_left):
    """bool [tokens]: whether keys lie between those of the causal mask and those of the span. The core's mask is one
    interval a query and would show them; where a query stands in its span, there are none."""
    begin, end = spans.unbind(1)
    apart = begin > ahead
    if causal_window_left >= 0 and not 0 < range_window_left <= causal_window_left + 1:
        before = end < ahead - (causal_window_left + 1)
        if range_window_left > 0:
            before &= end > ahead - range_window_left
        apart |= before
    return apart & (begin < end)


class ApartReport:
    """Tells of queries apart from their range on a GPU: found there without waiting, raised by a later call."""

    def __init__(self, device):
        self._found = torch.zeros(1, dtype=torch.bool, device=device)
        self._told = torch.zeros(1, dtype=torch.bool, pin_memory=True)

    def add(self, apart):
        """Enqueues the check of one run. In a CUDA graph every replay makes it."""
        self._found |= apart.any()
        self._told.copy_(self._found, non_blocking=True)

    def check(self):
        """Raises for what runs found that have ended."""
        if not torch.cuda.is_current_stream_capturing() and self._told.item():
            torch.cuda.synchronize(self._found.device)
            self._found.zero_()
            self._told.zero_()
            raise ValueError("bidirectional_ranges of an earlier run had a range apart from its query: keys between them, "
                             "outside of both windows, were attended to as well. On a GPU a range contains its query, "
                             "touches its causal keys or is -1 twice; give other masks as custom_mask")


def range_bits(ranges, causal_window_left, range_window_left, q_lens, kv_lens):
    """Bits of (causal and its window) or (in the query's range and its window).

    ranges: int32 [tokens, 2], first and last key of each query's range, -1 for none. causal_window_left keeps the
    distances 0 to that, below 0 all; range_window_left keeps distances below it, 0 and less all.
    """
    parts, row = [], 0
    for q_len, kv_len in zip(q_lens.tolist(), kv_lens.tolist()):
        q, k = _positions(q_len, kv_len, ranges.device)
        own = ranges[row:row + q_len]
        row += q_len
        visible = k <= q
        if causal_window_left >= 0:
            visible &= q - k <= causal_window_left
        in_range = (k >= own[:, :1]) & (k <= own[:, 1:])
        if range_window_left > 0:
            in_range &= q - k < range_window_left
        parts.append(arguments.pack_bits(visible | in_range))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=ranges.device)


def with_items(custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len,
               max_item_len_ptr, q_lens, kv_lens):
    """The batch's custom mask: the one given, or that of several items behind a prefix.

    A token behind prefix_len sees the prefix and its own item; token_pos_in_items_ptr has its place in the item, the
    requests' rows being token_pos_in_items_len long.
    """
    if prefix_len_ptr is None:
        arguments.refuse("it belongs to prefix_len_ptr", token_pos_in_items_ptr=token_pos_in_items_ptr,
                         token_pos_in_items_len=token_pos_in_items_len or None, max_item_len_ptr=max_item_len_ptr)
        return custom_mask
    if custom_mask is not None or packed_custom_mask is not None or token_pos_in_items_ptr is None:
        raise ValueError("prefix_len_ptr is given: token_pos_in_items_ptr must be, and custom masks must not")
    prefixes = arguments.to_host(prefix_len_ptr.to(torch.int32))[0].reshape(-1)
    places = token_pos_in_items_ptr.reshape(-1).to(torch.int64)
    parts = []
    for r, (q_len, kv_len) in enumerate(zip(q_lens.tolist(), kv_lens.tolist())):
        q, k = _positions(q_len, kv_len, places.device)
        prefix = int(prefixes[r])
        own = places[r * token_pos_in_items_len:] if token_pos_in_items_len else places
        in_items = q[:, 0] - prefix
        place = torch.where(in_items >= 0, own[in_items.clamp(0, max(len(own) - 1, 0))], kv_len)[:, None]
        parts.append(((k <= q) & ((k < prefix) | (q < k + place))).reshape(-1))
    return torch.cat(parts)
