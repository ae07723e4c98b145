#!/usr/bin/env python3
"""Plants one mistake at a time in a copy of the sources and checks that a test fails.

    tests/mutations/mutate.py [--list | --applies] [--only NAME ...] [--part [N]] [--minutes M] [--test PROGRAM ...] [--jobs N] [--keep DIR]

The mistakes stand in mutations.py: in which file, the exact text to replace (it must occur exactly once: when sources
move, this fails loudly), the new text. A mistake is caught if one of the test programs below fails,
crashes or hangs, or does not compile because of a static assertion. Exit status: 0 if all are caught, 1 if one is missed or does not apply or build, 2 if the unchanged
sources fail.
"""

import argparse
import collections
import concurrent.futures
import datetime
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time

import backend_mutations  # noqa: F401: importing these plants more mistakes in MUTATIONS
import core_mutations  # noqa: F401
import cuda_mutations  # noqa: F401
import dcp_mutations  # noqa: F401
import flash_attn_mutations  # noqa: F401
import flashinfer_mutations  # noqa: F401
import paged_attention_mutations  # noqa: F401
import pcp_mutations  # noqa: F401
import replay_mutations  # noqa: F401
import scheduler_mutations  # noqa: F401
import token_pool_mutations  # noqa: F401
import token_list_mutations  # noqa: F401
from mutations import MUTATIONS, PREPARATIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The test programs and the directories that they test. A mistake is tried on those nearest to its file first; then in this
# order, the quickest first.
TESTS = {
    "folio_backends_dispatch_test": "src/backends/dispatch",
    "folio_backends_flashinfer_test": "src/backends/flashinfer",
    "folio_backends_flash_attn_test": "src/backends/flash_attn",
    "folio_backends_common_test": "src/backends/common",
    "folio_backends_token_pool_test": "src/backends/token_pool",
    "backend_selection_test": "tests/backends",
    "folio_scheduler_test": "src/scheduler",
    "folio_kvcache_test": "src/kvcache",
    "folio_pool_allocation_test": "src/kvcache",
    "folio_kvcache_model_quick_test": "src/kvcache",
    "folio_kernels_generic_cache_test": "src/kernels/cpu/generic/cache",
    "folio_kernels_cuda_common_test": "src/kernels/cuda/common",
    "folio_kernels_cuda_coverage_test": "src/kernels/cuda",
    "folio_kernels_cuda_sm80_test": "src/kernels/cuda/sm80",
    "folio_kernels_cuda_sm90_test": "src/kernels/cuda/sm90",
    "folio_kernels_generic_combine_test": "src/kernels/cpu/generic/combine",
    "folio_replay_core_test": "tools/replay",
    "folio_core_test": "src/core",
    "folio_platform_test": "src/platform",
    "folio_capi_test": "src/capi",
    "folio_capi_backends_test": "src/capi/backends",
    "folio_testing_test": "src/testing",
    "folio_paged_attention_test": "src/attention",
    "folio_attention_test": "src/attention",
    "conformance_quick_test": "src/kernels/cpu",
    "folio_kernels_generic_test": "src/kernels/cpu/generic",
    "folio_kernels_inventory_test": "src/kernels",
    "folio_kernels_amx_test": "src/kernels/cpu/amx",
    "folio_flash_attn_batches_test": "src/backends/flash_attn",
    "folio_pcp_test": "src/distributed",
    "folio_distributed_test": "src/distributed",
    "folio_distributed_allocation_test": "src/distributed",
    "folio_backends_dcp_test": "tests/backends",
    "folio_token_pool_backend_test": "src/backends/token_pool",
    "folio_backends_invariance_test": "tests/backends",
    "folio_backends_batches_test": "tests/backends",
}
# What the CPU must have for the tests of some files to run: mistakes there are not tried without it.
NEEDED_FEATURES = {"/cpu/amx/": "avx512vbmi"}
NOT_COPIED = shutil.ignore_patterns("build", "build-*", ".git", ".cache", "__pycache__", "_skbuild")
CMAKE_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DBUILD_SHARED_LIBS=OFF", "-DFOLIO_BUILD_STATIC_TOO=OFF",
    "-DFOLIO_BUILD_TOOLS=ON", "-DFOLIO_REPORT=OFF", "-DFOLIO_BUILD_EXAMPLES=OFF", "-DFOLIO_BUILD_BENCHMARKS=OFF",
    "-DFOLIO_BUILD_PACKAGE_TESTS=OFF", "-DFOLIO_INSTALL=OFF", "-DFOLIO_CUDA=OFF", "-DFOLIO_BUILD_PYTHON=OFF",
    "-DFOLIO_KERNEL_COMPILE_OPTIONS=-O1", "-DFOLIO_SOURCES_TOGETHER=16",
    "-DFOLIO_TEST_COMPILE_OPTIONS=-Og", "-DFOLIO_TEST_SOURCES_TOGETHER=16",
]
PARTS = 30  # of all mutations, for --part
TEST_TIMEOUT_S = 120  # a planted mistake may loop for ever

Result = collections.namedtuple("Result", "mutation verdict by seconds")


class Copy:
    """A copy of the sources with its build directory."""

    def __init__(self, directory, tests):
        self.tests = tests
        self.source = directory / "source"
        self.build = directory / "build"
        shutil.rmtree(self.source, ignore_errors=True)
        # With new times: an object that a planted mistake left in a kept build directory is older.
        shutil.copytree(ROOT, self.source, ignore=NOT_COPIED, symlinks=True, copy_function=shutil.copy)
        for edit in PREPARATIONS:
            apply(self.source, edit)
        options = list(CMAKE_OPTIONS)
        os.environ["CCACHE_BASEDIR"] = str(directory.parent)  # the copies share what they compile
        if shutil.which("ccache"):
            options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        self.run_or_die(["cmake", "-S", self.source, "-B", self.build, *generator, *options])

    @staticmethod
    def run_or_die(command):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, file=sys.stderr)
            sys.exit(2)

    def compile(self, program, threads=1):
        """None if the program builds, else the compiler's last words."""
        done = subprocess.run(["cmake", "--build", self.build, "-j", str(threads), "--target", program],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return None if done.returncode == 0 else done.stdout[-3000:]

    def failing_test(self, name):
        """The first test that fails in a test program; None if all pass."""
        program = next(path for path in self.build.rglob(name) if path.is_file() and os.access(path, os.X_OK))
        try:
            done = subprocess.run([program, "--gtest_fail_fast", "--gtest_brief=1"],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                                  errors="replace", timeout=TEST_TIMEOUT_S, cwd=self.build)
        except subprocess.TimeoutExpired:
            return f"{name} (hangs)"
        if done.returncode == 0:
            return None
        failed = [line.split("]")[1].split("(")[0].split(",")[0].strip()
                  for line in done.stdout.splitlines() if line.startswith("[  FAILED  ]")]
        return f"{name} {failed[0] if failed else '(crashes)'}"

    def try_mutation(self, mutation):
        start = time.monotonic()
        for part, feature in NEEDED_FEATURES.items():
            if any(part in edit.file for edit in mutation.edits) and not has(feature):
                return Result(mutation, "not tried", f"its tests need a CPU with {feature}", 0.0)
        originals = {edit.file: (self.source / edit.file).read_text() for edit in mutation.edits}
        for edit in mutation.edits:
            apply(self.source, edit)
        try:
            for program in nearest_first(mutation, self.tests):
                errors = self.compile(program)
                if errors and "static assertion failed" in errors:
                    return Result(mutation, "caught", "a static assertion", time.monotonic() - start)
                if errors:
                    return Result(mutation, "does not build", errors, time.monotonic() - start)
                if by := self.failing_test(program):
                    return Result(mutation, "caught", by, time.monotonic() - start)
        finally:
            for file, text in originals.items():
                (self.source / file).write_text(text)
        return Result(mutation, "MISSED", "", time.monotonic() - start)


def has(feature):
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.exists() and feature in cpuinfo.read_text(encoding="utf-8").split()


def nearest_first(mutation, tests):
    """The programs whose directory has most in common with the mutated file's first."""
    parts = mutation.edits[0].file.split("/")

    def distance(program):
        mine = TESTS[program].split("/")
        common = len(os.path.commonprefix([mine, parts]))
        return len(mine) - 2 * common

    return sorted(tests, key=distance)


def apply(root, edit):
    path = root / edit.file
    path.write_text(path.read_text().replace(edit.old, edit.new))


def inapplicable():
    """Edits whose old text does not occur exactly once, or that change nothing."""
    problems = []
    for name, edits in [("preparations", PREPARATIONS)] + [(m.name, m.edits) for m in MUTATIONS]:
        for edit in edits:
            path = ROOT / edit.file
            count = path.read_text().count(edit.old) if path.exists() else -1
            if count < 0:
                problems.append(f"{name}: there is no {edit.file}")
            elif count != 1:
                problems.append(f"{name}: occurs {count} times in {edit.file}: {edit.old!r}")
            if edit.old == edit.new:
                problems.append(f"{name}: changes nothing in {edit.file}")
    names = [mutation.name for mutation in MUTATIONS]
    problems += [f"{name}: the name is given twice" for name in sorted(set(names)) if names.count(name) > 1]
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the mistakes and check that they apply; build nothing")
    parser.add_argument("--applies", action="store_true", help="only check that every mistake applies; takes a second")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these (a name, or the beginning of one)")
    parser.add_argument("--part", nargs="?", type=int, const=datetime.date.today().toordinal() % PARTS, metavar="N",
                        choices=range(PARTS), help="only one of 30 parts: number N, or today's, so that 30 days take all")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="M",
                        help="begin no mutation when the unchanged sources have been built for so long; which come first changes every 30 days")
    parser.add_argument("--test", nargs="+", metavar="PROGRAM", choices=TESTS, default=list(TESTS),
                        help="only these test programs: " + ", ".join(TESTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="copies built and tested at once (default: cores)")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="keep the copies there and build on what is there")
    arguments = parser.parse_args()

    problems = inapplicable()
    if arguments.list:
        for mutation in MUTATIONS:
            print(f"{mutation.name:36} {mutation.rule:20} {mutation.edits[0].file}")
        print(f"{len(MUTATIONS)} mutations")
    for problem in problems:
        print(problem, file=sys.stderr)
    if arguments.applies and not problems:
        print(f"mutations: {len(MUTATIONS)} apply")
    if problems or arguments.list or arguments.applies:
        return 1 if problems else 0

    chosen = [m for m in MUTATIONS if not arguments.only or any(m.name.startswith(name) for name in arguments.only)]
    if arguments.part is not None:  # neighbours in the list: mistakes of one subject, found by few programs
        chosen = chosen[len(chosen) * arguments.part // PARTS : len(chosen) * (arguments.part + 1) // PARTS]
    if chosen and arguments.minutes != float("inf"):  # a third further with every cycle of all parts
        first = datetime.date.today().toordinal() // PARTS * (len(chosen) // 3 + 1) % len(chosen)
        chosen = chosen[first:] + chosen[:first]
    if not chosen:
        parser.error("no mutation has such a name; see --list")
    directory = arguments.keep or pathlib.Path(tempfile.mkdtemp(prefix="folio-mutations-"))
    start = time.monotonic()
    try:
        results = run_all(chosen, directory, max(1, min(arguments.jobs, len(chosen))), arguments.test, arguments.minutes)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)
    return report(results, time.monotonic() - start)


def run_all(chosen, directory, jobs, tests, minutes):
    """Result of every mutation; "not begun" of those whose turn came `minutes` after the unchanged sources were built."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        copies = list(pool.map(lambda number: Copy(directory / str(number), tests), range(jobs)))
        sound = sorted({nearest_first(mutation, tests)[0] for mutation in chosen}, key=list(TESTS).index)
        check_unchanged(copies[0], sound, jobs)  # the others then find most objects in the compiler cache
        deadline = time.monotonic() + 60 * minutes
        free = queue.Queue()
        for copy in copies:
            free.put(copy)

        def one(mutation):
            copy = free.get()
            try:
                if time.monotonic() > deadline:
                    return Result(mutation, "not begun", "", 0)
                result = copy.try_mutation(mutation)
            finally:
                free.put(copy)
            print(f"{result.verdict:15} {mutation.name:36} {result.seconds:5.0f} s  {result.by.splitlines()[-1] if result.by else ''}",
                  flush=True)
            return result

        results = list(pool.map(one, chosen))
        # What caught a mistake must pass without it; the nearest programs have shown that already.
        check_unchanged(copies[0], sorted({r.by.split()[0] for r in results if r.verdict == "caught"} & (set(TESTS) - set(sound))))
        return results


def check_unchanged(copy, programs, threads=1):
    """Ends with status 2 where a program does not build or fails with the unchanged sources."""
    for program in programs:
        if errors := copy.compile(program, threads):
            print(f"the unchanged {program} does not build:\n{errors}", file=sys.stderr)
            sys.exit(2)
        if by := copy.failing_test(program):
            print(f"the unchanged sources fail: {by}", file=sys.stderr)
            sys.exit(2)


def report(results, seconds):
    width = max(len(result.mutation.rule) for result in results)
    print(f"\n{'rule':{width}}  caught  planted")
    for rule in dict.fromkeys(result.mutation.rule for result in results):
        of_rule = [result for result in results if result.mutation.rule == rule]
        print(f"{rule:{width}}  {sum(r.verdict == 'caught' for r in of_rule):6}  {len(of_rule):7}")
    bad = [result for result in results if result.verdict not in ("caught", "not tried", "not begun")]
    for result in bad:
        print(f"\n{result.verdict}: {result.mutation.name} ({result.mutation.edits[0].file})")
        if result.verdict != "MISSED":
            print(result.by)
    caught = sum(result.verdict == "caught" for result in results)
    late = sum(result.verdict == "not begun" for result in results)
    print(f"\n{caught} of {len(results)} caught, {len(results) - len(bad) - caught - late} not tried, {late} not begun, in {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
