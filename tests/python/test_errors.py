"""Errors, stale plans, bad page ids, threads."""

import sys
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
    assert caught.value.code == folio.ErrorCode.kInvalidArgument
    assert str(caught.value).startswith("num_threads is -1")
    config = problems.make().config
    config.kv_format = folio.KvFormat.kCpuPacked
    config.page_size = 7
    with pytest.raises(folio.Error) as caught:
        folio.prepare(folio.Context.cpu(num_threads=1), config)
    assert isinstance(caught.value, RuntimeError) and caught.value.code != folio.ErrorCode.kInternal


def test_no_such_gpu():
    with pytest.raises(folio.Error) as caught:
        folio.Context.cuda(1000)
    assert caught.value.code == folio.ErrorCode.kUnavailable


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
        assert caught.value.code == folio.ErrorCode.kStalePlan
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
    assert caught.value.code == folio.ErrorCode.kStalePlan


@pytest.mark.parametrize("page", [-1, 10_000, 2**31 - 1])
def test_a_page_that_is_not_there_is_refused(page):
    problem = problems.make()
    problem.batch.pages[1][0] = page
    with pytest.raises(folio.InvalidArgument):
        problems.run(problem)
    with pytest.raises(folio.InvalidArgument):
        folio.reference_attention(problem.config, problem.batch_view(), problem.args(None))


def test_a_small_workspace_is_refused():
    problem = problems.make(batch="decode")
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    with pytest.raises(folio.Error) as caught:
        folio.run(plan, problem.args(*problem.outputs()), folio.Workspace(0))
    assert caught.value.code == folio.ErrorCode.kWorkspaceTooSmall


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
                if error.code != folio.ErrorCode.kStalePlan:
                    failures.append(str(error))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
