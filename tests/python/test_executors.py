"""Contexts on the engine's threads, and Python work on a context's."""

import concurrent.futures
import gc
import os
import sys
import threading

import folio
import numpy as np
import pytest

import problems

CONTEXT = folio.Context.cpu(num_threads=3)


def run_on(executor):
    problem = problems.make(batch="prefill", q_heads=16)
    context = folio.Context.cpu(executor=executor)
    assert context.concurrency == executor.concurrency
    problems.assert_close(problem, *problems.run(problem, context), problem.exact())


def test_a_pool_of_python():
    seen = set()

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def map(self, body, items):
            return super().map(lambda i: (seen.add(threading.get_ident()), body(i)), items)

    with Pool(3) as pool:
        run_on(folio.Executor(pool, 3))
    assert seen and threading.get_ident() not in seen


def test_a_function():
    counts = []

    def backwards(n, body):
        counts.append(n)
        for i in reversed(range(n)):
            body(i)

    executor = folio.Executor(backwards, concurrency=4)
    assert "concurrency 4" in repr(executor)
    run_on(executor)
    assert counts and max(counts) > 1


@pytest.mark.parametrize("fault", ["nothing", "half", "raises", "twice", "outside", "keeps"])
def test_executors_with_faults_lose_no_work(fault):
    """What a wrong executor does is reported and made good: every call is made once."""
    kept, reported = [], []

    def parallel_for(n, body):
        kept.append(body)
        for i in range(n if fault not in ("nothing", "half") else n // 2 if fault == "half" else 0):
            body(i)
            if fault == "twice":
                body(i)
            if fault == "outside":
                body(n)
            if fault == "raises":
                raise RuntimeError("no more")

    hook, sys.unraisablehook = sys.unraisablehook, lambda error: reported.append(error.exc_value)
    try:
        run_on(folio.Executor(parallel_for, 2))
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert bool(reported) == (fault in ("raises", "twice", "outside"))
    for body in kept:
        with pytest.raises(folio.InvalidArgument, match="has been called before|must be in"):
            body(0)


def test_pinning():
    own = os.sched_getaffinity(0)
    context = folio.Context.cpu(num_threads=len(own), pinning=folio.ThreadPinning.PINNED)
    problem = problems.make(batch="prefill", q_heads=16)
    problems.assert_close(problem, *problems.run(problem, context), problem.exact())
    assert os.sched_getaffinity(0) == own
    with pytest.raises(folio.InvalidArgument, match=f"the process may run on {len(own)} CPUs"):
        folio.Context.cpu(num_threads=len(own) + 1, pinning="pinned")
    with pytest.raises(folio.InvalidArgument, match="pinning is given beside an executor"):
        folio.Context.cpu(executor=folio.Executor(lambda n, body: [body(i) for i in range(n)], 2), pinning="unpinned")


def test_an_executor_outlives_its_name():
    problem = problems.make()
    context = folio.Context.cpu(executor=folio.Executor(lambda n, body: [body(i) for i in range(n)], 2))
    gc.collect()
    problems.assert_close(problem, *problems.run(problem, context), problem.exact())


def test_python_work_on_a_context():
    done, threads = np.zeros(100, np.int64), set()

    def body(i):
        done[i] += 1
        threads.add(threading.get_ident())

    CONTEXT.parallel_for(100, body)
    assert np.all(done == 1) and threads
    with pytest.raises(KeyError, match="7"):
        CONTEXT.parallel_for(20, lambda i: {}[7])
    CONTEXT.parallel_for(0, None.__class__)
    folio.synchronize(CONTEXT)


def test_refusals():
    for call, message in [(lambda: folio.Executor(print, 0), "concurrency is 0"),
                          (lambda: folio.Context.cpu(executor=folio.Executor(print, 1), num_threads=2), "num_threads"),
                          (lambda: CONTEXT.parallel_for(-1, print), "n is -1"),
                          (lambda: folio.synchronize(CONTEXT, stream=5), "stream")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
    for call in (lambda: folio.Executor(5, 1), lambda: folio.Context.cpu(executor=print),
                 lambda: CONTEXT.parallel_for(3, 5)):
        with pytest.raises(TypeError):
            call()
