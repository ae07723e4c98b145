"""bench/peers: rows, and a comparison on a CPU."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import folio
import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"
sys.path.insert(0, str(BENCH))

from rows import ROWS, Row, decode, prompts  # noqa: E402


def test_operations_of_a_row():
    assert decode("d", 3, 100, q_heads=4, kv_heads=2, dim=8).flops() == 2 * 4 * 16 * 300
    assert prompts("p", 1, 3, q_heads=1, kv_heads=1, dim=8).flops() == 2 * 16 * (1 + 2 + 3)
    assert prompts("p", 1, 3, before=5, q_heads=1, kv_heads=1, dim=8, window=7).flops() == 2 * 16 * (6 + 7 + 7)
    assert Row("m", (1,), (10,), q_heads=2, kv_heads=1, dim=576, mla=True).flops() == 2 * 2 * (576 + 512) * 10
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.fixture(name="main", scope="module")
def load_main():
    spec = importlib.util.spec_from_file_location("bench_peers_main", BENCH / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_programs_prepare_a_row_at_once_where_they_may(main):
    events = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def send(self, row):
            events.append(("send", self.name, row))

        def answer(self):
            events.append(("answer", self.name))
            return {"of": self.name}

        def ask(self, row):
            self.send(row)
            return self.answer()

    workers = [Recorded("a"), Recorded("b")]
    sent, answered = [("send", name, 7) for name in "ab"], [("answer", name) for name in "ab"]
    assert main.prepare_row(workers, 7, at_once=True) == [{"of": "a"}, {"of": "b"}]
    assert events == sent + answered
    events.clear()
    assert main.prepare_row(workers, 7, at_once=False) == [{"of": "a"}, {"of": "b"}]
    assert events == [sent[0], answered[0], sent[1], answered[1]]


def test_a_program_that_has_ended_says_so_every_time(main):
    worker = main.Worker.__new__(main.Worker)
    worker.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)
    worker.process.wait()
    assert worker.answer() == worker.ask(row=0) == worker.ask(time=True) == {"failed": "ended with status 3"}


def test_keys_that_llama_cpp_hides():
    torch = pytest.importorskip("torch")
    from programs.llama_cpp_program import hidden_keys

    hidden = torch.isneginf(hidden_keys(2, 5, 0, 0))
    assert hidden.tolist() == [[False, False, False, False, True], [False] * 5]
    hidden = torch.isneginf(hidden_keys(2, 5, 2, 2))  # of keys 2 to 4; the queries stand at 3 and 4
    assert hidden.tolist() == [[False, False, True], [True, False, False]]


LLAMA_CPP = any(importlib.util.find_spec(name) for name in ("llama_cpp", "llama_cpp_py_sync"))


@pytest.mark.skipif(not LLAMA_CPP, reason="llama.cpp is not installed")
@pytest.mark.parametrize("name", ["LlamaCpp", "LlamaCppQ8"])
@pytest.mark.parametrize("row", [
    decode("lengths differ", 2, 40, q_heads=4, kv_heads=2, dim=64),
    Row("mixed", (7, 7, 1, 1, 1), (7, 7, 90, 90, 600), q_heads=4, kv_heads=2, dim=64),
    prompts("prompts behind tokens", 2, 70, before=33, q_heads=4, kv_heads=4, dim=128, soft_cap=20.0),
    prompts("window", 1, 130, before=50, q_heads=2, kv_heads=1, dim=64, window=20)], ids=lambda row: row.name)
def test_llama_cpp_attends(name, row):
    from problem import Problem
    from programs import llama_cpp_program

    program = getattr(llama_cpp_program, name)("cpu")
    problem = Problem(row, "cpu")
    run = program.prepare(problem)
    for layer in {0, len(problem.caches) - 1}:
        assert problem.error(run(layer), layer, requests=5) < program.largest_error


def compare(*arguments, file):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(folio.__file__).parents[1])}
    return subprocess.run([sys.executable, str(BENCH), *arguments, "--json", str(file)], env=environment, text=True,
                          capture_output=True, timeout=250, check=False)


def test_a_comparison_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    done = compare("--rows", "prefill 1x1024", "prefill 8x2*", "--rounds", "1", "--threads", "1", "--programs",
                   "folio,torch_sdpa,flash_mla,llama_cpp,read,gemm", file=tmp_path / "times.json")
    assert done.returncode == 0, done.stderr
    assert "without flash_mla: " in done.stderr
    assert LLAMA_CPP or "without llama_cpp: RuntimeError: no package of llama_cpp, " in done.stderr
    row, last = done.stdout.splitlines()[-2:]
    assert row.startswith("| prefill 1x1024 | ") and "torch_sdpa " in row and "WRONG" not in row
    assert last.startswith("| prefill 8x256 | ")
    result, _ = json.loads((tmp_path / "times.json").read_text())["results"]
    assert set(result["us"]) - {"llama_cpp"} == {"folio", "torch_sdpa", "read", "gemm"}
    assert all(len(times) == 1 and times[0] > 0 for times in result["us"].values())
    assert result["said"]["folio"]["error"] < 4e-3


def test_what_does_not_exist_is_refused(tmp_path):
    pytest.importorskip("torch")
    for arguments, message in ((("--programs", "folio,flsh"), "no program 'flsh'"), (("--rows", "x*"), "no row of cpu")):
        done = compare(*arguments, file=tmp_path / "times.json")
        assert done.returncode == 2 and message in done.stderr
