"""Conformance cases from Python."""

import folio
import pytest


def test_cases_of_every_kernel_pass():
    kernels = folio.runnable_kernels()
    assert kernels and kernels == folio.runnable_kernels(folio.Context.cpu(num_threads=1))
    cases = folio.random_cases(kernels, 30, seed=3)
    assert len(cases) == 30 == len(set(cases)) and cases == folio.random_cases(kernels, 30, seed=3)
    for case in cases:
        report = folio.run_case(case)
        assert report.passed, f"{case}: {report.failure}"
        assert report.worst_share <= 1 and report.failure == ""


def test_a_covering_array_of_pairs_of_nothing():
    cases, coverage = folio.covering_array(["generic"] if "generic" in folio.runnable_kernels() else
                                           folio.runnable_kernels()[-1:], strength=1)
    assert coverage.strength == 1 and coverage.covered == coverage.valid <= coverage.tuples
    factors = folio.conformance_factors()
    for name, levels in factors.items():  # the first level is left out of a text
        for level in levels[1:]:
            assert any(f"{name}={level}" in case.split() for case in cases) or coverage.valid < coverage.tuples


def test_refusals():
    kernel = folio.runnable_kernels()[0]
    assert folio.check_refusals(kernel) == []
    for call, message in [(lambda: folio.run_case("page=banana"), "banana"),
                          (lambda: folio.run_case("colour=red"), "colour"),
                          (lambda: folio.covering_array(["no such kernel"]), "no such kernel"),
                          (lambda: folio.covering_array([kernel], strength=4), "strength")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
