"""Plans written out as integers."""

import folio
import numpy as np
import pytest

import problems


def planned(batch="mixed"):
    problem = problems.make("float32", batch)
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config,
                       folio.PrepareOptions(bounds=folio.GraphBounds(max_requests=4, max_tokens=32, max_q_len=32,
                                                                     max_kv_len=64)))
    return problem, op, folio.make_plan_buffer(op)


def run(problem, op, plan):
    out, lse = problem.outputs()
    workspace = folio.Workspace(folio.workspace_size(op))
    folio.init_workspace(op, workspace)
    folio.run(plan, problem.args(out, lse), workspace)
    problems.assert_close(problem, out, lse, problem.exact())


def test_a_sealed_plan_outlives_the_plan():
    problem, op, buffer = planned()
    plan = folio.plan(op, problem.batch_view(), buffer)
    size = folio.SealedPlan.size(plan)
    assert 0 < size <= folio.SealedPlan.max_size(op) and not folio.is_sealed(plan)
    memory, sealed = np.full(folio.SealedPlan.max_size(op), -9, np.int32), folio.SealedPlan(op)
    assert sealed.seal(plan, memory) == size and np.all(memory[size:] == -9) and np.any(memory[:size] != -9)
    folio.plan(op, problems.make("float32", "decode").batch_view(), buffer)
    made = sealed.plan()
    assert folio.is_sealed(made) and made.num_tokens == plan.num_tokens and str(size) in repr(sealed)
    del sealed
    folio.check_sealed(made, memory[:size])
    run(problem, op, made)
    folio.validate(made, problem.args(problem.outputs()[0]))
    memory[size // 2] ^= 1
    with pytest.raises(folio.InvalidArgument, match="changed after"):
        folio.check_sealed(made, memory[:size])
    run(problem, op, made)  # what was checked when it was planned


def test_the_next_seal_makes_it_stale():
    problem, op, buffer = planned()
    plan = folio.plan(op, problem.batch_view(), buffer)
    memory, sealed = np.zeros(folio.SealedPlan.max_size(op), np.int32), folio.SealedPlan(op)
    sealed.seal(plan, memory)
    first = sealed.plan()
    decode, _, _ = planned("decode")
    sealed.seal(folio.plan(op, decode.batch_view(), buffer), memory)
    run(decode, op, sealed.plan())
    second = sealed.plan()
    sealed.report()
    sealed.invalidate()
    for stale, made_for in ((first, problem), (second, decode), (plan, problem)):
        for use in (lambda: run(made_for, op, stale), lambda: folio.SealedPlan.size(stale)):
            with pytest.raises(folio.Error) as caught:
                use()
            assert caught.value.code == folio.ErrorCode.STALE_PLAN


def test_refusals():
    problem, op, buffer = planned()
    plan = folio.plan(op, problem.batch_view(), buffer)
    size, sealed = folio.SealedPlan.size(plan), folio.SealedPlan(op)
    memory = np.full(size, -9, np.int32)
    other = folio.SealedPlan(planned()[1])
    with pytest.raises(folio.Error) as caught:
        sealed.plan()
    assert caught.value.code == folio.ErrorCode.STALE_PLAN
    unbounded = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    for call, message in [(lambda: sealed.seal(plan, memory[1:]), f"memory has {size - 1} entries; the plan takes"),
                          (lambda: sealed.seal(plan, memory.astype(np.int64)), "memory is int64"),
                          (lambda: other.seal(plan, memory), "op"),
                          (lambda: folio.check_sealed(plan, memory), "sealed"),
                          (lambda: folio.SealedPlan.max_size(unbounded), "GraphBounds")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
    assert np.all(memory == -9)
    sealed.seal(plan, memory)
    for handed in (memory[:-1], memory.copy()):
        with pytest.raises(folio.InvalidArgument, match="not the memory"):
            folio.check_sealed(sealed.plan(), handed)
