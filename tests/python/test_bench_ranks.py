"""bench/ranks.py, with a program that answers as folio bench does."""

import importlib.util
import json
import pathlib
import stat
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("bench_ranks", ROOT / "bench" / "ranks.py")
ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks)

PROGRAM = """#!{python}
import json, sys, time
arguments = sys.argv[1:]
def of(option): return arguments[arguments.index(option) + 1]
if of("--sweep") == "prefill" and of("--q-len") == "524288": time.sleep(60)
if of("--sweep") == "decode" and of("--batch") == "64": sys.exit("no memory")
number = int(of("--ranks"))
seconds = 0.5 / number if "--simulate" in arguments else 0.6 / number
assert "--transport" not in arguments or "--simulate" not in arguments
spread = dict(median=seconds, min=seconds / 2, max=seconds * 2)
print(json.dumps(dict(cases=[dict(one_rank_s=dict(median=0.5), layer_s=spread, efficiency=dict(median=0.5 / 0.6))])))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    program = tmp_path / "folio"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def call(*arguments):
        file = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["ranks.py", "--folio", str(program), "--json", str(file), *arguments])
        status = ranks.main()
        return status, json.loads(file.read_text())["results"], capsys.readouterr().out

    return call


def test_every_case_over_every_number_of_ranks(run):
    status, results, text = run("--ranks", "2,4", "--only", "1x1048576")
    assert status == 0 and len(results) == 12 and text.count("\n") == 13
    first = results[0]
    assert first["case"] == "decode 1x1048576, in graphs, peer memory" and first["ranks"] == 2
    assert first["one_ms"] == 500 and first["ranks_ms"] == 300 and first["spread"] == [150, 600]
    assert first["speedup"] == pytest.approx(1.67, abs=0.01) and "--transport peer" in first["command"]
    assert {result["case"] for result in results if "simulated_ms" in result} == {
        "decode 1x1048576, in graphs, NCCL, a2a", "decode 1x1048576, in graphs, NCCL, ag_rs"}
    assert [result["simulated_ms"] for result in results if "simulated_ms" in result] == [250, 250, 125, 125]


def test_what_fails_or_takes_too_long_is_noted_and_the_rest_goes_on(run):
    status, results, text = run("--ranks", "2", "--only", "64x8192")
    assert status == 1 and {result["stopped"] for result in results} == {"no memory"}
    status, results, text = run("--ranks", "2", "--only", "prefill", "--seconds", "2")
    assert status == 1 and results[0]["simulated_ms"] == 250 and results[1]["stopped"] == "after 2 s"
    assert "after 2 s" in text


def test_no_case_of_that_name_is_a_misuse(run):
    with pytest.raises(SystemExit):
        run("--ranks", "2", "--only", "nothing")
