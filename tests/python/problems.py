"""Random paged problems for the tests, and what may differ between a result and the exact one."""

import dataclasses

import folio
import ml_dtypes
import numpy as np

import paged_attention

DTYPES = {
    "float32": (np.float32, folio.float32),
    "float16": (np.float16, folio.float16),
    "bfloat16": (ml_dtypes.bfloat16, folio.bfloat16),
}

BATCHES = {
    "decode": ([1, 1, 1], [33, 1, 16]),
    "prefill": ([7, 16], [7, 16]),
    "mixed": ([1, 5, 0, 3], [40, 21, 0, 3]),
}

PAGE_SIZE = 16


@dataclasses.dataclass
class Problem:
    config: folio.AttentionConfig
    batch: paged_attention.Batch
    rules: paged_attention.Rules
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def batch_view(self):
        return folio.BatchView(self.batch.cu_q, [folio.KvSegment(self.batch.lengths)])

    def segment(self):
        table = folio.csr_table(self.batch.page_ids, self.batch.page_indptr)
        return folio.SegmentArgs(folio.make_nhd_view(self.k, self.v), table)

    def args(self, out, lse=None, **changes):
        given = {
            "lse": lse,
            "sm_scale": self.rules.sm_scale,
            "logits_soft_cap": self.rules.cap,
            "alibi_slopes": self.rules.slopes,
            "sinks": self.rules.sinks,
        }
        return folio.AttentionArgs(self.q, out, [self.segment()], **{**given, **changes})

    def outputs(self):
        tokens, heads = self.q.shape[:2]
        out = np.full((tokens, heads, self.v.shape[3]), np.nan).astype(self.q.dtype)
        return out, np.full((tokens, heads), np.nan, np.float32)

    def exact(self):
        return paged_attention.attention(self.q, self.k, self.v, self.batch, self.rules)


def make(dtype="float32", batch="mixed", q_heads=4, kv_heads=2, dim_qk=32, dim_v=24, seed=1, features=None,
         window=(-1, -1), causal=True, cap=0.0, slopes=False, sinks=False):
    """A problem with its pages shuffled, and NaN wherever nothing may be read."""
    random = np.random.default_rng(seed)
    element, name = DTYPES[dtype]
    q_len, kv_len = BATCHES[batch]
    counts = [-(-length // PAGE_SIZE) for length in kv_len]
    ids = random.permutation(sum(counts) + 2).tolist()
    pages = [[ids.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, PAGE_SIZE, kv_heads)
    k, v = np.full((*shape, dim_qk), np.nan), np.full((*shape, dim_v), np.nan)
    for length, own in zip(kv_len, pages):
        for token in range(length):
            place = own[token // PAGE_SIZE], token % PAGE_SIZE
            k[place] = random.standard_normal((kv_heads, dim_qk))
            v[place] = random.standard_normal((kv_heads, dim_v))
    declared = [folio.Feature.SOFT_CAP] * (cap != 0) + [folio.Feature.ALIBI] * slopes + [folio.Feature.SINKS] * sinks
    features = None
    for feature in declared:
        features = feature if features is None else features | feature
    config = folio.AttentionConfig(
        num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim_qk=dim_qk, head_dim_v=dim_v, q=name, kv=name,
        page_size=PAGE_SIZE, mask=folio.MaskKind.CAUSAL if causal else folio.MaskKind.NONE, window_left=window[0],
        window_right=window[1], features=features)
    rules = paged_attention.Rules(
        1.0 / np.sqrt(dim_qk), causal, *window, cap,
        np.linspace(0.05, 0.5, q_heads, dtype=np.float32) if slopes else None,
        random.standard_normal(q_heads).astype(np.float32) if sinks else None)
    q = random.standard_normal((sum(q_len), q_heads, dim_qk)).astype(element)
    return Problem(config, paged_attention.Batch(q_len, kv_len, pages), rules, q, k.astype(element), v.astype(element))


def run(problem, context=None, out=None, lse=None):
    """Folio's (out, lse) for a problem."""
    context = context or folio.Context.cpu(num_threads=2)
    if out is None or lse is None:
        made, made_lse = problem.outputs()
        out, lse = made if out is None else out, made_lse if lse is None else lse
    op = folio.prepare(context, problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    workspace = folio.Workspace(folio.workspace_size(op))
    folio.init_workspace(op, workspace)
    folio.run(plan, problem.args(out, lse), workspace)
    return out, lse


def logit_error(problem):
    """How far a float32 logit may lie from the exact one: a dot product of n terms errs by n eps times the sum of the
    terms' sizes, and scale, cap and slope add a few roundings of values of that size."""
    eps = np.finfo(np.float32).eps
    dim = problem.q.shape[2]
    q = np.linalg.norm(problem.q.astype(np.float64), axis=2).max()
    k = np.linalg.norm(np.nan_to_num(problem.k.astype(np.float64)), axis=3).max()
    longest = max(problem.batch.kv_len)
    bias = 0.0 if problem.rules.slopes is None else float(problem.rules.slopes.max()) * longest
    return eps * ((dim + 4) * q * k * problem.rules.sm_scale + 4 * bias)


def assert_close(problem, out, lse, exact):
    """Logits off by d change each weight by about 2 d of itself (numerator and denominator), sums of n weighted values
    add n roundings; then the output is rounded to its dtype, of which half an ulp is eps / 2. Kernels may round the
    weights to the values' dtype before the second product, as matrix units take them: one more eps / 2."""
    exact_out, exact_lse, magnitude = exact
    eps32 = float(np.finfo(np.float32).eps)
    eps = float(ml_dtypes.finfo(out.dtype).eps)
    tiny = float(ml_dtypes.finfo(out.dtype).smallest_subnormal)
    n = max(problem.batch.kv_len) + 2
    relative = 2 * logit_error(problem) + 2 * n * eps32
    allowed = magnitude * (relative + eps / 2) + np.abs(exact_out) * eps / 2 + tiny
    error = np.abs(out.astype(np.float64) - exact_out)
    assert np.all(error <= allowed), f"output: {np.max(error / allowed)} of what is allowed"
    finite = np.isfinite(exact_lse)
    assert np.array_equal(np.isneginf(lse), ~finite)
    lse_error = np.abs(lse[finite].astype(np.float64) - exact_lse[finite])
    lse_allowed = logit_error(problem) + n * eps32 + 2 * eps32 * np.abs(exact_lse[finite])
    assert np.all(lse_error <= lse_allowed), f"LSE: {np.max(lse_error / lse_allowed)} of what is allowed"
