"""How a padded box of queries and keys becomes Folio's requests."""

import folio
import numpy as np
import torch


class Layout:
    """Requests of a Visibility, in the order of the query rows.

    Queries that see nothing are requests without keys: their output is 0, and nothing is computed for them. With
    `folds`, each KV head of each sequence is a request of its own: [batch, KV heads, keys] is then read in place.
    """

    page_size = 16
    kv_format = folio.KvFormat.STRIDED
    source = folio.KvSource.RAGGED
    cache = None  # the pages' view
    ragged = None  # (k, v) where there are no pages

    def __init__(self, visible, folds, rows):
        self.visible = visible
        self.folds = folds
        self.rows = rows  # from one request's keys to the next's
        self.key = (visible.key, folds, rows)

    def describe(self):
        """(BatchView, facts) to plan from; facts() is told where each request's keys begin, and where the last end."""
        seen = self.visible
        before, after = seen.q_start, seen.q_length - seen.q_start - seen.q_len
        none = np.zeros_like(before)
        q_len = self._spread(before, seen.q_len, after)
        keep = q_len > 0
        kv_len = self._spread(none, seen.kv_len, none)[keep]
        first_pos = self._spread(none, seen.q_first_pos, none)[keep]
        base = (np.arange(len(before) * self.folds) * self.rows).repeat(3)
        start = (base + self._spread(none, seen.kv_start, seen.kv_start + seen.kv_len))[keep]
        batch = folio.BatchView(
            _int32(np.concatenate([[0], np.cumsum(q_len[keep])])),
            [folio.KvSegment(_int32(kv_len), source=self.source)],
            q_first_pos=_int32(first_pos),
            custom_mask=None if seen.bits is None else folio.CustomMask(),
        )
        end = len(before) * self.folds * self.rows
        return batch, self.facts(_int32(np.append(start, end)))

    def facts(self, start):
        """What a folio.Step takes as its table, made once with its plan."""
        return start

    def _spread(self, *parts):
        return np.repeat(np.stack(parts, 1)[:, None, :], self.folds, 1).reshape(-1)

    def custom_mask(self, device):
        if self.visible.bits is None:
            return None
        packed = np.repeat(self.visible.packed_bits, self.folds, 0).reshape(-1)
        return packed if device.type == "cpu" else torch.from_numpy(packed).to(device)


class TensorLayout(Layout):
    """Keys and values as transformers' caches return them, [batch, KV heads, keys, head_dim].

    One sequence, or tensors that were [batch, keys, KV heads, head_dim] before, are read in place with all heads of a
    sequence together. So are contiguous ones, folded. Only sinks, which are by head, make a batch's keys be copied.
    """

    def __init__(self, query, key, value, visible, together):
        batch, heads, q_length, dim = query.shape
        kv_heads, kv_length = key.shape[1:3]
        in_place = batch == 1 or key.transpose(1, 2).is_contiguous()
        folds = 1 if together or in_place else kv_heads
        if folds == 1 and not in_place:
            kv_length = int((visible.kv_start + visible.kv_len).max())
            key, value = key[:, :, :kv_length], value[:, :, :kv_length]
        super().__init__(visible, folds, kv_length)
        self.device = query.device
        self.num_kv_heads = kv_heads // folds
        if folds == 1:
            self.q = query.transpose(1, 2).reshape(batch * q_length, heads, dim)
            self.k, self.v = (half.transpose(1, 2).reshape(batch * kv_length, kv_heads, -1) for half in (key, value))
        else:
            grouped = query.reshape(batch, kv_heads, heads // kv_heads, q_length, dim).transpose(2, 3)
            self.q = grouped.reshape(-1, heads // kv_heads, dim)
            self.k, self.v = (half.reshape(batch * kv_heads * kv_length, 1, half.shape[3]) for half in (key, value))
        self.box = batch, folds, q_length, self.q.shape[1]

    def facts(self, start):
        return start if self.device.type == "cpu" else torch.from_numpy(start).to(self.device)

    @property
    def ragged(self):
        return self.k.detach(), self.v.detach()

    def unfold(self, out):
        """[batch, queries, heads, head_dim_v] of rows in the order of the requests."""
        batch, folds, q_length, heads = self.box
        return out.view(batch, folds, q_length, heads, -1).transpose(1, 2).reshape(batch, q_length, folds * heads, -1)


def _int32(values):
    return np.ascontiguousarray(values, np.int32)
