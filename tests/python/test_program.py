"""The command `folio` of a wheel: it becomes the program inside the package, with a trace to replay."""

import os

import pytest
from folio import program


@pytest.fixture
def started(monkeypatch):
    """What the process would have become."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: calls.append((path, arguments)))
    return calls


def test_starts_the_program_with_the_arguments_and_a_trace(monkeypatch, tmp_path, started):
    monkeypatch.setattr(program, "PROGRAM", tmp_path / "folio")
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/folio", "replay", "--requests", "3"])
    monkeypatch.setenv("FOLIO_TRACE", "")  # so that what main() sets does not stay
    monkeypatch.delenv("FOLIO_TRACE")
    program.PROGRAM.touch()
    program.main()
    assert started == [(program.PROGRAM, ["folio", "replay", "--requests", "3"])]
    assert os.environ["FOLIO_TRACE"] == str(program.TRACE)


def test_a_trace_that_is_named_is_kept(monkeypatch, tmp_path, started):
    monkeypatch.setattr(program, "PROGRAM", tmp_path / "folio")
    monkeypatch.setenv("FOLIO_TRACE", "mine.jsonl")
    program.PROGRAM.touch()
    program.main()
    assert started and os.environ["FOLIO_TRACE"] == "mine.jsonl"


def test_without_a_program_says_how_to_get_one(monkeypatch, tmp_path, started):
    monkeypatch.setattr(program, "PROGRAM", tmp_path / "folio")
    with pytest.raises(SystemExit, match="FOLIO_BUILD_TOOLS=ON"):
        program.main()
    assert not started
