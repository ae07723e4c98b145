"""A small engine for the backends' tests: requests that grow over steps, their pages, and what attention over them is.

Keys and values are kept per request, apart from any cache, so that a backend that stores them wrongly is noticed too.
"""

import dataclasses

import ml_dtypes
import numpy as np

import paged_attention

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass
class Request:
    pages: list
    k: np.ndarray
    v: np.ndarray


@dataclasses.dataclass
class Step:
    """One step's arrays, decodes and prefills in the order in which they were scheduled."""

    names: list
    q_lens: list
    seq_lens: list
    block_table: np.ndarray
    slots: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def query_start_loc(self):
        return np.cumsum([0, *self.q_lens]).astype(np.int32)

    def batch_arguments(self):
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": np.array(self.seq_lens, np.int32),
            "block_table": self.block_table,
            "slot_mapping": self.slots,
        }


class Engine:
    def __init__(self, dtype="float32", q_heads=4, kv_heads=2, dim=64, page_size=16, num_pages=64, seed=1, stored=None):
        """stored: what a value becomes in the cache; None: itself."""
        self.dtype, self.q_heads, self.kv_heads, self.dim = DTYPES[dtype], q_heads, kv_heads, dim
        self.page_size, self.num_pages = page_size, num_pages
        self.random = np.random.default_rng(seed)
        self.free = self.random.permutation(np.arange(1, num_pages)).tolist()
        self.requests = {}
        self.stored = stored or (lambda value: value)

    def values(self, *shape):
        return self.random.standard_normal(shape).astype(self.dtype)

    def fork(self, name, new, tokens):
        """`new` begins with another request's first tokens, whole pages of them, and shares those pages."""
        old = self.requests[name]
        assert tokens % self.page_size == 0
        self.requests[new] = Request(old.pages[:tokens // self.page_size], old.k[:tokens], old.v[:tokens])

    def step(self, schedule):
        """schedule: {request: new tokens}; requests that are not known yet begin."""
        q_lens = list(schedule.values())
        tokens = sum(q_lens)
        q = self.values(tokens, self.q_heads, self.dim)
        k, v = self.values(tokens, self.kv_heads, self.dim), self.values(tokens, self.kv_heads, self.dim)
        slots, first = [], 0
        for name, count in schedule.items():
            request = self.requests.setdefault(name, Request([], k[:0], v[:0]))
            before = len(request.k)
            request.k = np.concatenate([request.k, self.stored(k[first:first + count])])
            request.v = np.concatenate([request.v, self.stored(v[first:first + count])])
            while len(request.pages) * self.page_size < before + count:
                request.pages.append(self.free.pop())
            for position in range(before, before + count):
                page = request.pages[position // self.page_size]
                slots.append(page * self.page_size + position % self.page_size)
            first += count
        columns = max(len(self.requests[name].pages) for name in schedule) + 2
        table = np.full((len(schedule), columns), -1, np.int32)  # what is no page is never read
        for row, name in zip(table, schedule):
            row[:len(self.requests[name].pages)] = self.requests[name].pages
        seq_lens = [len(self.requests[name].k) for name in schedule]
        return Step(list(schedule), q_lens, seq_lens, table, np.array(slots, np.int64), q, k, v)

    def rules(self, **changes):
        return paged_attention.Rules(1.0 / np.sqrt(self.dim), **changes)

    def exact(self, step, rules):
        """(out, magnitude) in float64: the queries are the last tokens of their requests."""
        out = np.zeros(step.q.shape)
        magnitude = np.zeros(step.q.shape)
        group = self.q_heads // self.kv_heads
        token = 0
        for name, q_len, seq_len in zip(step.names, step.q_lens, step.seq_lens):
            k, v = (values[:seq_len].astype(np.float64) for values in
                    (self.requests[name].k, self.requests[name].v))
            for i in range(q_len):
                for head in range(self.q_heads):
                    out[token, head], _, magnitude[token, head] = paged_attention.row(
                        step.q[token, head].astype(np.float64), k[:, head // group], v[:, head // group], rules,
                        seq_len - q_len + i, head)
                token += 1
        return out, magnitude

    def assert_close(self, step, out, rules):
        """The bound of problems.assert_close: logits err by their dot products' rounding, weights by twice that, sums
        by a rounding a term; probabilities and outputs may be rounded to the output's dtype."""
        exact, magnitude = self.exact(step, rules)
        eps32 = float(np.finfo(np.float32).eps)
        eps = float(ml_dtypes.finfo(out.dtype).eps)
        longest = max(step.seq_lens)
        q = np.linalg.norm(step.q.astype(np.float64), axis=2).max()
        k = max(np.linalg.norm(self.requests[name].k.astype(np.float64), axis=2).max() for name in step.names)
        bias = 0.0 if rules.slopes is None else float(np.max(rules.slopes)) * longest
        logit = eps32 * ((self.dim + 4) * q * k * rules.sm_scale + 4 * bias)
        tiny = float(ml_dtypes.finfo(out.dtype).smallest_subnormal)
        allowed = magnitude * (2 * logit + 2 * (longest + 2) * eps32 + eps / 2) + np.abs(exact) * eps / 2 + tiny
        error = np.abs(out.astype(np.float64) - exact)
        assert np.all(error <= allowed), f"{np.max(error / allowed)} of what is allowed"


# A prefill, a chunked one, mixed steps and decodes; requests in an order that puts decodes in front.
SCHEDULES = [
    {"a": 5, "b": 21},
    {"a": 1, "b": 16},
    {"a": 1, "b": 1, "c": 34},
    {"b": 1, "a": 1, "c": 1},
    {"c": 1, "a": 1, "d": 1},
]

RULES = {
    "causal": {},
    "window": {"left": 6},
    "cap": {"cap": 3.0},
    "alibi": {"slopes": np.linspace(0.05, 0.5, 4, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-1.0, 2.0, 4, dtype=np.float32)},
    "everything": {
        "left": 9,
        "cap": 4.0,
        "slopes": np.linspace(0.02, 0.3, 4, dtype=np.float32),
        "sinks": np.linspace(-1.0, 2.0, 4, dtype=np.float32),
    },
}


def layer_arguments(rules):
    """A layer's arguments, as vLLM calls them, for such rules."""
    return {
        "alibi_slopes": None if rules.slopes is None else rules.slopes.tolist(),
        "sliding_window": None if rules.left < 0 else rules.left + 1,
        "logits_soft_cap": rules.cap or None,
        "sinks": rules.sinks,
    }
