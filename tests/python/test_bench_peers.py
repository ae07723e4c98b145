"""bench/peers: rows, and a comparison on a CPU."""

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


def compare(*arguments, file):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(folio.__file__).parents[1])}
    return subprocess.run([sys.executable, str(BENCH), *arguments, "--json", str(file)], env=environment, text=True,
                          capture_output=True, timeout=250, check=False)


def test_a_comparison_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    done = compare("--rows", "prefill 1x1024", "--rounds", "1", "--threads", "1", "--programs",
                   "folio,torch_sdpa,flash_mla,read,gemm", file=tmp_path / "times.json")
    assert done.returncode == 0, done.stderr
    assert "without flash_mla: " in done.stderr
    row = done.stdout.splitlines()[-1]
    assert row.startswith("| prefill 1x1024 | ") and "torch_sdpa " in row and "WRONG" not in row
    (result,) = json.loads((tmp_path / "times.json").read_text())["results"]
    assert set(result["us"]) == {"folio", "torch_sdpa", "read", "gemm"}
    assert all(len(times) == 1 and times[0] > 0 for times in result["us"].values())
    assert result["said"]["folio"]["error"] < 4e-3


def test_what_does_not_exist_is_refused(tmp_path):
    pytest.importorskip("torch")
    for arguments, message in ((("--programs", "folio,flsh"), "no program 'flsh'"), (("--rows", "x*"), "no row of cpu")):
        done = compare(*arguments, file=tmp_path / "times.json")
        assert done.returncode == 2 and message in done.stderr
