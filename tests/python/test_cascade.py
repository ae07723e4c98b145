"""Shared prefixes beside a search of all rows, and attention over cascades beside numpy."""

import gc
import itertools

import folio
import numpy as np
import pytest

import paged_attention
import problems

PAGE_SIZE = problems.PAGE_SIZE


def table_of(rows):
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return folio.csr_table(np.array(sum(map(list, rows), []), np.int32), indptr)


def random_rows(random):
    rows = []
    for _ in range(random.integers(1, 9)):
        base = list(rows[-1]) if rows and random.random() < 0.7 else []
        keep = random.integers(0, len(base) + 1)
        rows.append(base[:keep] + random.integers(0, 3, random.integers(0, 4)).tolist())
    return rows


def shared_prefixes(rows, full):
    """{(begin, end, pages)}: every run of neighbours, and every prefix, that is as long as it can be."""
    def common(begin, end):
        first = rows[begin]
        length = min(full[begin:end])
        while any(row[:length] != first[:length] for row in rows[begin:end]):
            length -= 1
        return length

    found = set()
    for begin, end in itertools.combinations(range(len(rows) + 1), 2):
        pages = common(begin, end)
        if end - begin < 2 or pages == 0:
            continue
        if begin > 0 and common(begin - 1, end) == pages or end < len(rows) and common(begin, end + 1) == pages:
            continue
        found.add((begin, end, pages))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_prefixes_are_those_of_a_search(seed):
    random = np.random.default_rng(seed)
    rows = random_rows(random)
    full = [int(random.integers(max(0, len(row) - 1), len(row) + 1)) for row in rows]
    found = folio.SharedPrefixFinder().find(table_of(rows), full)
    assert {(one.begin, one.end, one.pages) for one in found} == shared_prefixes(rows, full)
    for i, one in enumerate(found):
        around = [other for other in found if other.begin <= one.begin and one.end <= other.end and other != one]
        smallest = min(around, key=lambda other: other.end - other.begin, default=None)
        assert (found[one.parent] if one.parent >= 0 else None) == smallest and (one.parent < 0 or one.parent > i)


def test_an_order_that_makes_sharers_neighbours():
    rows = [[1, 2, 3], [9], [1, 2, 4], [8], [1, 2, 3]]
    order = folio.SharedPrefixFinder().order(table_of(rows), [len(row) for row in rows], range_of(5))
    assert sorted(order.tolist()) == list(range(5)) and order.dtype == np.int32
    places = {row: i for i, row in enumerate(order.tolist())}
    assert abs(places[0] - places[4]) == 1 and max(places[0], places[2], places[4]) == 2
    with pytest.raises(folio.InvalidArgument):
        folio.SharedPrefixFinder().order(table_of(rows), [1] * 5, [5])
    with pytest.raises(folio.InvalidArgument, match="row 1|1"):
        folio.SharedPrefixFinder().find(table_of(rows), [1, 2, 1, 1, 1])


def range_of(n):
    return np.arange(n)


def sharing_problem(shared=3):
    """Three requests with the first pages in common, a fourth without."""
    problem = problems.make("float32", "decode", q_heads=8)
    random = np.random.default_rng(7)
    common = list(range(shared))
    pages = [common + [3, 4], common + [5], common + [6, 7], [8, 9]]
    kv_len = [shared * PAGE_SIZE + 20, shared * PAGE_SIZE + 5, shared * PAGE_SIZE + 32, 17]
    shape = (10, PAGE_SIZE, 2)
    problem.k, problem.v = (random.standard_normal((*shape, dim)).astype(np.float32) for dim in (32, 24))
    problem.batch = paged_attention.Batch([1, 2, 1, 1], kv_len, pages)
    problem.q = random.standard_normal((5, 8, 32)).astype(np.float32)
    return problem


def run_cascade(problem, cascade, op):
    batch = folio.BatchView(problem.batch.cu_q, cascade.segments)
    plan = folio.plan(op, batch, folio.make_plan_buffer(op))
    cache = folio.make_nhd_view(problem.k, problem.v)
    out, lse = problem.outputs()
    args = folio.AttentionArgs(problem.q, out, [folio.SegmentArgs(cache, table) for table in cascade.tables], lse=lse,
                               sm_scale=problem.rules.sm_scale)
    workspace = folio.Workspace(folio.workspace_size(plan))
    folio.init_workspace(op, workspace)
    folio.run(plan, args, workspace)
    problems.assert_close(problem, out, lse, problem.exact())
    return folio.summary(plan).kv_tokens_read


def dense(rows):
    wide = np.full((len(rows), 8), -1, np.int32)
    for entries, row in zip(wide, rows):
        entries[1:1 + len(row)] = row
    return folio.dense_table(wide[:, :7], first_column=1)


@pytest.mark.parametrize("make_table", [table_of, dense])
def test_a_cascade_attends_over_the_same_keys_and_reads_fewer(make_table):
    problem = sharing_problem()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    costs = folio.cascade_costs(op)
    assert costs.page_size == PAGE_SIZE and costs.group_size == 4 and costs.kv_token_bytes == 4 * (32 + 24)
    planner, table = folio.CascadePlanner(op), make_table(problem.batch.pages)
    assert planner.max_levels == 4 and planner.costs == costs
    given = problem.batch.cu_q, problem.batch.lengths, table
    whole = planner.share(*given, 0)
    assert (whole.levels_shared, len(whole.segments)) == (0, 1)
    run_cascade(problem, whole, op)
    with pytest.raises(folio.InvalidArgument, match="request 3 has page"):
        planner.share(*given, PAGE_SIZE)
    problem.batch.pages[3] = [0, 1, 2, 8]
    problem.batch.kv_len[3] = 3 * PAGE_SIZE + 9
    given = problem.batch.cu_q, problem.batch.lengths, make_table(problem.batch.pages)
    plain = run_cascade(problem, planner.share(*given, 0), op)
    cascade = planner.share(*given, 3 * PAGE_SIZE + 5)
    assert (cascade.levels_shared, cascade.num_levels, len(cascade.tables)) == (1, 1, 2)
    planner.discover([0, 1], [4], table_of([[0]]))  # what it made before is still there
    del planner
    gc.collect()
    assert run_cascade(problem, cascade, op) < plain


def test_discovered_cascades():
    problem = sharing_problem()
    config = problem.config
    op = folio.prepare(folio.Context.cpu(num_threads=1), config)
    given = problem.batch.cu_q, problem.batch.lengths, table_of(problem.batch.pages)
    cheap = folio.cascade_costs(op)
    cheap.q_row_bytes = cheap.partial_row_bytes = 0
    cheap.tile_tokens = 1
    found = folio.CascadePlanner(cheap).discover(*given)
    assert found.levels_shared >= 1 and found.bytes_saved > 0
    run_cascade(problem, found, op)
    run_cascade(problem, folio.CascadePlanner(op).discover(*given), op)
    dear = folio.cascade_costs(op)
    dear.partial_row_bytes = 10**9
    assert folio.CascadePlanner(dear).discover(*given).levels_shared == 0
    cheap.determinism = "batch_invariant"
    assert folio.CascadePlanner(cheap).discover(*given).levels_shared == 0


def test_refusals():
    problem = sharing_problem()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    planner, table = folio.CascadePlanner(op), table_of(problem.batch.pages)
    for refused, message in [
            (lambda: folio.CascadePlanner(op, folio.MAX_CASCADE_LEVELS + 1), "max_levels is 9"),
            (lambda: planner.discover([0, 1], [4, 4], table), "cu_q has 2 entries, kv_len 2"),
            (lambda: planner.discover([0, 2, 1], [4, 4], table), "request 1"),
            (lambda: planner.discover([0, 1], [-4], table), "request 0"),
            (lambda: planner.discover([0, 1], [10**6], table), "row 0"),
            (lambda: planner.share([0, 1], [4], table, -1), "prefix_tokens is -1"),
            (lambda: planner.discover([0, 1], [4], table, device_indices=np.zeros(3, np.int32)), "device_indices"),
            (lambda: planner.discover([0, 1], [4], table, stream=7), "stream|device"),
            (lambda: planner.discover([0, 1], [7 * PAGE_SIZE], dense([[1] * 6])), "7 columns; row 0 needs 7 pages")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    with pytest.raises(TypeError, match="tile_rows"):
        folio.CascadeCosts(tile_tokens=1)
