"""Errors, stale plans, bad page ids, threads."""

import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import folio
import numpy as np
import pytest

import problems


def test_codes_and_types():
    with pytest.raises(folio.Error) as caught:
        folio.Context.cpu(num_threads=-1)
    assert isinstance(caught.value, folio.InvalidArgument) and isinstance(caught.value, ValueError)
    assert caught.value.code == folio.ErrorCode.INVALID_ARGUMENT
    assert str(caught.value).startswith("num_threads is -1")
    config = problems.make().config
    config.kv_format = folio.KvFormat.CPU_PACKED
    config.page_size = 7
    with pytest.raises(folio.Error) as caught:
        folio.prepare(folio.Context.cpu(num_threads=1), config)
    assert isinstance(caught.value, RuntimeError) and caught.value.code != folio.ErrorCode.INTERNAL


def test_no_such_gpu():
    with pytest.raises(folio.Error) as caught:
        folio.Context.cuda(1000)
    assert caught.value.code == folio.ErrorCode.UNAVAILABLE


def test_a_stale_plan_is_refused():
    problem = problems.make()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    buffer = folio.make_plan_buffer(op)
    stale = folio.plan(op, problem.batch_view(), buffer)
    folio.plan(op, problem.batch_view(), buffer)
    out, lse = problem.outputs()
    workspace = folio.Workspace(folio.workspace_size(op))
    for use in (lambda: folio.run(stale, problem.args(out, lse), workspace), lambda: folio.summary(stale),
                lambda: folio.workspace_size(stale)):
        with pytest.raises(folio.Error) as caught:
            use()
        assert caught.value.code == folio.ErrorCode.STALE_PLAN
    assert np.all(np.isnan(out))


def test_a_failed_plan_leaves_none_behind():
    problem = problems.make()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    buffer = folio.make_plan_buffer(op)
    plan = folio.plan(op, problem.batch_view(), buffer)
    bad = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(-problem.batch.lengths)])
    with pytest.raises(folio.InvalidArgument):
        folio.plan(op, bad, buffer)
    with pytest.raises(folio.Error) as caught:
        folio.summary(plan)
    assert caught.value.code == folio.ErrorCode.STALE_PLAN


@pytest.mark.parametrize("page", [-1, 10_000, 2**31 - 1])
def test_a_page_that_is_not_there_is_refused(page):
    problem = problems.make()
    problem.batch.pages[1][0] = page
    with pytest.raises(folio.InvalidArgument):
        problems.run(problem)
    with pytest.raises(folio.InvalidArgument):
        folio.reference_attention(problem.config, problem.batch_view(), problem.args(None))


@pytest.mark.parametrize("indptr,message", [
    ([0, 7], r"segments\[0\].ragged.indptr has 2 entries; the plan's 2 rows need one more"),
    ([0, 16, 7], r"row 1 is \[16, 7\)"),
    ([-1, 7, 23], r"row 0 is \[-1, 7\)"),
    ([0, 7, 24], r"row 1 is \[7, 24\)"),
    ([2**31 - 1, 2**31 - 1, 2**31 - 1], "row 0"),
])
def test_offsets_of_ragged_keys_are_checked(indptr, message):
    problem = problems.make(batch="prefill")
    keys, values = (np.zeros((23, 2, dim), np.float32) for dim in (32, 24))
    ragged = folio.RaggedKvView(keys, values, np.array(indptr, np.int32))
    batch = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths, source=folio.KvSource.RAGGED)])
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    plan = folio.plan(op, batch, folio.make_plan_buffer(op))
    out, _ = problem.outputs()
    args = folio.AttentionArgs(problem.q, out, [folio.SegmentArgs(ragged=ragged)])
    workspace = folio.Workspace(folio.workspace_size(plan))
    for use in (lambda: folio.run(plan, args, workspace), lambda: folio.validate(plan, args),
                lambda: folio.reference_attention(problem.config, batch, args)):
        with pytest.raises(folio.InvalidArgument, match=message):
            use()
    assert np.isnan(out).all()


def test_a_dense_table_with_too_few_columns_is_refused():
    """Its row stride has room for more: what lies there is not of the table."""
    problem = problems.make(batch="decode")
    wide = np.zeros((3, 8), np.int32)
    table = folio.dense_table(wide[:, :3], first_column=1)
    problem.segment = lambda: folio.SegmentArgs(folio.make_nhd_view(problem.k, problem.v), table)
    with pytest.raises(folio.InvalidArgument, match="has 3 columns; row 0 needs 3 pages from column 1"):
        problems.run(problem)


def in_a_process(script):
    """Runs `script` in a Python of its own, which it may bring down; returns its exit status."""
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=pathlib.Path(__file__).parent,
                          timeout=120, check=False).returncode


def test_tables_and_slots_that_change_meanwhile_do_no_harm():
    """A thread rewrites page ids, offsets and slots, good and bad in turn, while others are at work with them: a call
    takes them or refuses them."""
    assert in_a_process("""
        import threading, time
        import folio, numpy as np
        import problems
        problem = problems.make(batch="prefill")
        problem.batch.q_len, problem.batch.kv_len, problem.batch.pages = [1], [4096], [[0] * 256]
        problem.k, problem.v, problem.q = np.zeros_like(problem.k), np.zeros_like(problem.v), problem.q[:1].copy()
        ids, offsets, lengths = problem.batch.page_ids, problem.batch.page_indptr, problem.batch.lengths
        table = folio.csr_table(ids, offsets)
        out, lse = problem.outputs()
        args = folio.AttentionArgs(problem.q, out, [folio.SegmentArgs(folio.make_nhd_view(problem.k, problem.v), table)])
        context = folio.Context.cpu(num_threads=1)
        op = folio.prepare(context, problem.config)
        batch = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(lengths)])
        buffer, workspace = folio.make_plan_buffer(op), folio.Workspace(folio.workspace_size(op))
        new, slots = np.zeros((4096, 2, 32), np.float32), np.zeros(4096, np.int64)
        write = folio.CacheWriteArgs(new, np.zeros((4096, 2, 24), np.float32), slots,
                                     folio.make_nhd_view(problem.k, problem.v))
        stop = threading.Event()

        def rewrite():
            while not stop.is_set():
                ids[128:], offsets[0], lengths[0], slots[2000:] = 2**31 - 1, -2**30, 2**31 - 1, 2**40
                time.sleep(1e-5)
                ids[128:], offsets[0], lengths[0], slots[2000:] = 0, 0, 4096, 0
                time.sleep(1e-5)

        other = threading.Thread(target=rewrite)
        other.start()
        done = refused = 0
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline or not (done and refused):
            for call in (lambda: folio.run(folio.plan(op, batch, buffer), args, workspace),
                         lambda: folio.write_kv_cache(context, write)):
                try:
                    call()
                    done += 1
                except folio.Error:
                    refused += 1
        stop.set()
        other.join()
    """) == 0


def test_a_daemon_thread_inside_a_call_lets_the_process_end():
    assert in_a_process("""
        import threading
        import folio
        import problems
        problem = problems.make(batch="prefill", q_heads=16)
        op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
        plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
        started = threading.Event()

        def serve():
            args, workspace = problem.args(*problem.outputs()), folio.Workspace(folio.workspace_size(op))
            while True:
                folio.run(plan, args, workspace)
                started.set()

        for _ in range(4):
            threading.Thread(target=serve, daemon=True).start()
        started.wait()
    """) == 0


def test_a_small_workspace_is_refused():
    problem = problems.make(batch="decode")
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    with pytest.raises(folio.Error) as caught:
        folio.run(plan, problem.args(*problem.outputs()), folio.Workspace(0))
    assert caught.value.code == folio.ErrorCode.WORKSPACE_TOO_SMALL


@pytest.mark.parametrize("size", [2**62, 2**64 - 1])
def test_a_workspace_beyond_memory_is_refused(size):
    with pytest.raises(folio.Error, match=f"no host memory for a workspace of {size} bytes") as caught:
        folio.Workspace(size)
    assert caught.value.code == folio.ErrorCode.OUT_OF_MEMORY


def test_other_threads_run_meanwhile():
    """With a switch interval of an hour only a call that lets go of the interpreter lets another thread run."""
    problem = problems.make(batch="prefill", q_heads=16)
    out, lse = problem.outputs()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    args, workspace = problem.args(out, lse), folio.Workspace(folio.workspace_size(op))
    turns, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)  # lets go

    interval = sys.getswitchinterval()
    other = threading.Thread(target=count)
    try:
        sys.setswitchinterval(3600)
        other.start()
        before = turns[0]
        for _ in range(100_000):
            folio.run(plan, args, workspace)
            if turns[0] > before:
                break
        assert turns[0] > before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        other.join()


def test_threads_may_share_an_op_and_a_buffer():
    problem = problems.make()
    expected, _ = problems.run(problem, folio.Context.cpu(num_threads=1))
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    shared = folio.make_plan_buffer(op)
    failures = []

    def serve():
        out, lse = problem.outputs()
        workspace = folio.Workspace(folio.workspace_size(op))
        buffer = folio.make_plan_buffer(op)
        for _ in range(50):
            folio.run(folio.plan(op, problem.batch_view(), buffer), problem.args(out, lse), workspace)
            if not np.array_equal(out, expected):
                failures.append("a result differs")
            try:
                folio.run(folio.plan(op, problem.batch_view(), shared), problem.args(out, lse), workspace)
            except folio.Error as error:
                if error.code != folio.ErrorCode.STALE_PLAN:
                    failures.append(str(error))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
