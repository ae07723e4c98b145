"""One step of continuous batching for one group of layers: its lengths, its page table, and when it is over."""

import folio
import numpy as np
import torch


class Step:
    """What the steps of both places have in common."""

    def bind(self, op, planned):
        """The folio.Step of an op's plan and this step's tables and slots: one for all layers of the op."""
        known = self._bound.get(op)
        if known is None or known[0] is not planned:
            tables = self.table if self.writes_first else [self.table, self.cu_q]
            known = self._bound[op] = (
                planned,
                folio.Step(planned.plan, tables, op.workspace, slot_mapping=self.write_index),
            )
        return known[1]


class HostStep(Step):
    """A step whose lengths and slots lie on the host. Recognised by what they hold, so it is never another step's."""

    bounds = None

    def __init__(self, given, longest, tokens, block_size, windowed):
        self._bound = {}
        self._given = [array.numpy().copy() for array in given]
        cu_q, cu_k, read, write = self._given
        self.cu_q = np.ascontiguousarray(cu_q, np.int32)
        q_len, k_len = np.diff(cu_q), np.diff(cu_k)
        self.write_index = np.ascontiguousarray(write[:tokens], np.int64)
        blocks = None if windowed else _blocks(cu_k, read, cu_q, write, block_size)
        self.writes_first = blocks is not None
        self.page_size = block_size if self.writes_first else 1
        if self.writes_first:
            self.table = folio.csr_table(*blocks)
            self._lengths = k_len.astype(np.int32)
        else:
            past = k_len - q_len if read.size else np.zeros_like(q_len)
            offsets = cu_k if read.size else np.zeros_like(cu_k)
            self.table = folio.csr_table(read.astype(np.int32), np.ascontiguousarray(offsets, np.int32))
            self._lengths = past.astype(np.int32)
        self._q_len = q_len.astype(np.int32)
        self._tokens = tokens
        self.key = (self.cu_q.tobytes(), self._lengths.tobytes(), tokens)

    def is_that_of(self, given, again):
        return all(np.array_equal(held, array.numpy()) for held, array in zip(self._given, given))

    def batch(self):
        segments = [folio.KvSegment(self._lengths)]
        if not self.writes_first:
            segments.append(folio.KvSegment(self._q_len, source=folio.KvSource.RAGGED))
        return folio.BatchView(self.cu_q, segments, num_tokens=self._tokens)


def _blocks(cu_k, read, cu_q, write, block_size):
    """CSR (block ids, offsets) of slots that are whole blocks in order, or None if they are not."""
    slots, begin = (read, cu_k) if read.size else (write, cu_q)
    lengths = np.diff(begin)
    pages = -(-lengths // block_size)
    offsets = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    page = np.arange(offsets[-1]) - offsets[:-1].repeat(pages)
    ids = slots[begin[:-1].repeat(pages) + page * block_size] // block_size
    at = np.arange(begin[-1]) - begin[:-1].repeat(lengths)
    expected = ids[offsets[:-1].repeat(lengths) + at // block_size] * block_size + at % block_size
    return (ids.astype(np.int32), offsets) if np.array_equal(slots[: begin[-1]], expected) else None


class DeviceStep(Step):
    """A step whose lengths and slots lie on a GPU, in static buffers that transformers rewrites in place.

    What they hold cannot be looked at, so the step is recognised by its objects, which are held here and cannot be
    reused: transformers makes new slices of its buffers every step. A layer that comes again, as in a warm-up run
    followed by a capture, begins a new step; so does the beginning or end of a capture.
    """

    def __init__(self, given, longest, tokens, block_size, windowed):
        self._bound = {}
        self._given = given
        self._capturing = torch.cuda.is_current_stream_capturing()
        cu_q, cu_k, read, write = given
        max_q, max_k = longest
        requests = cu_q.shape[0] - 1
        if requests < 1 or tokens < 1 or not max_q or not max_k:
            raise ValueError("folio: cu_seq_lens_q, max_seqlen_q and max_seqlen_k must be given and not be empty")
        self.cu_q = cu_q.contiguous()
        self.write_index = write[:tokens]
        self.writes_first = not windowed
        self.page_size = 1 if windowed else block_size
        k_len, q_len = torch.diff(cu_k), torch.diff(cu_q)
        reads = read.shape[0] > 0
        if windowed:
            self._lengths = k_len - q_len if reads else torch.zeros_like(q_len)
            self._slots = read.int() if reads else write[:1].int()
            self.table = folio.csr_table(self._slots, cu_k.contiguous() if reads else torch.zeros_like(cu_k))
        else:
            slots, begin = (read, cu_k) if reads else (write, cu_q)
            columns = torch.arange(0, max_k, block_size, device=slots.device)
            at = (begin[:-1, None] + columns).clamp(max=slots.shape[0] - 1)
            self._slots = (slots[at] // block_size).int()  # entries beyond a request's length are never read
            self.table = folio.dense_table(self._slots)
            self._lengths = k_len
        self._q_len = q_len
        self._tokens = tokens
        self._longest = max_q, max_k
        self.bounds = tuple(_round_up(size) for size in (requests, tokens, max_q, max_k))
        self.key = object()  # a plan on the device is this step's alone

    def is_that_of(self, given, again):
        same = all(held is array for held, array in zip(self._given, given))
        return same and not again and self._capturing == torch.cuda.is_current_stream_capturing()

    def batch(self):
        segments = [folio.KvSegment(self._lengths)]
        if not self.writes_first:
            segments.append(folio.KvSegment(self._q_len, source=folio.KvSource.RAGGED))
        max_q, max_k = self._longest
        return folio.BatchView(self.cu_q, segments, num_tokens=self._tokens, max_q_len=max_q, max_kv_len=max_k)


def _round_up(size):
    """The next power of two, so that steps of similar sizes share an op."""
    return 1 << (size - 1).bit_length()
