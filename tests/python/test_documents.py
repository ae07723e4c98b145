"""What makes and checks the documents: tables from data, sentences, links, decisions, the changelog, the site's hooks."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "checks"))


def load(path):
    spec = importlib.util.spec_from_file_location(f"documents_{pathlib.Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = load("bench/results/page.py")
from_peers = load("bench/results/from_peers.py")
sentences = load("scripts/checks/check_sentences.py")
links = load("scripts/checks/check_links.py")
changelog = load("scripts/checks/check_changelog.py")
decisions = load("scripts/checks/check_decisions.py")
hooks = load("scripts/site/hooks.py")

RESULT = {"title": "T", "date": "2026-11-29", "machine": "m", "commit": "c", "commands": ["run it"], "settings": "s",
          "columns": {"row": "batch", "folio": "Folio, us", "peer": "Peer"},
          "rows": [{"row": "64x4096", "folio": 1246.5, "peer": [1.03, 1.0, 1.1]}, {"row": "1x1", "folio": 3}]}


class TestResults:
    def test_a_table(self):
        assert page.table(RESULT).splitlines()[2:] == ["| 64x4096 | 1,246.5 | 1.03 (1.00-1.10) |", "| 1x1 | 3 |  |"]
        assert list(page.problems_of(RESULT)) == []

    @pytest.mark.parametrize("change, message", [
        ({"date": "29.11."}, "date is not"),
        ({"machine": ""}, "machine is missing"),
        ({"colour": "red"}, "no field is called colour"),
        ({"rows": [{"row": "a", "other": 1}]}, "columns does not name"),
        ({"rows": [{"row": "a", "peer": [1.0, 1.1, 1.2]}]}, "not .median, least, largest."),
    ])
    def test_what_is_wrong_is_said(self, change, message):
        with pytest.raises(AssertionError, match=message):
            assert list(page.problems_of({**RESULT, **change})) == []

    def test_tables_are_put_in_their_places_and_new_ones_last(self):
        old = "# P\n\n<!-- results: a -->\nold\n<!-- end of results -->\n\nSo.\n"
        new, unknown = page.written(old, {"a": RESULT, "b": {**RESULT, "title": "New"}})
        assert "old" not in new and new.index("64x4096") < new.index("So.") < new.index("## New")
        assert unknown == [] and page.written(new, {"a": RESULT, "b": {**RESULT, "title": "New"}})[0] == new
        assert page.written(old, {})[1] == ["a"]

    def test_speeds_of_the_readme_are_records(self, monkeypatch):
        monkeypatch.setattr(page, "SPEEDS", [("decode", "a", "64x4096", ("folio", "us"), {"other": ("Peer", "peer")})])
        table, problems = page.speeds({"a": RESULT})
        assert problems == []
        assert table.splitlines()[2:] == ["| decode: 64x4096 | 1,246.5 us |  |  | Peer 1.03 | [a](bench/results/a.json) |"]

    @pytest.mark.parametrize("speed, message", [
        (("d", "b", "64x4096", ("folio", "us"), {}), "b.json has no record '64x4096' with folio"),
        (("d", "a", "2x2", ("folio", "us"), {}), "a.json has no record '2x2' with folio"),
        (("d", "a", "1x1", ("folio", "us"), {"other": ("Peer", "peer")}), "no record '1x1' with peer"),
        (("d", "a", "1x1", ("folio", "ms"), {}), "folio of bench/results/a.json does not say that it is in ms"),
    ])
    def test_a_speed_without_its_record_is_refused(self, monkeypatch, speed, message):
        monkeypatch.setattr(page, "SPEEDS", [speed])
        assert message in "".join(page.speeds({"a": RESULT})[1])

    def test_rounds_of_peers_become_medians(self, tmp_path, monkeypatch):
        run = {"results": [{"row": "r", "us": {"folio": [2000.0, 1000.0, 4000.0], "read": [1000.0, 900.0, 4000.0],
                                              "peer": [4000.0, 3000.0, 4000.0]}}, {"row": "failed", "us": {}}]}
        (tmp_path / "raw.json").write_text(json.dumps(run))
        monkeypatch.setattr(from_peers, "HERE", tmp_path)
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "raw.json"), "--name", "n", "--title", "T", "--machine", "m",
                                          "--commit", "c", "--settings", "s", "--command", "run it", "--unit", "ms"])
        from_peers.main()
        data = json.loads((tmp_path / "n.json").read_text())
        assert data["rows"] == [{"row": "r", "folio": 2.0, "read": 0.9, "peer": [2.0, 1.0, 3.0]}]
        assert list(data["columns"]) == ["row", "folio", "read", "peer"] and list(page.problems_of(data)) == []


def test_sentences_are_counted_without_code_tables_and_headings():
    text = "# A heading of five words\n\nOne two three. Four `a b c` [six words in a link](x.md)!\n\n| a | b |\n\n```sh\nx y z\n```\n- an item\n"
    assert sentences.lengths(text) == [3, 7, 2]
    assert sentences.lengths("See e.g. this one. Done.\n") == [4, 1]


def test_anchors_of_headings(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "read", lambda path: "# What is `x`, and why?\n## A\n```\n# no heading\n```\n## A\n")
    assert links.anchors(str(tmp_path)) == {"what-is-x-and-why", "a", "a-1"}


def test_a_link_that_leads_nowhere_is_found(monkeypatch):
    text = "[a](index.md) [b](none.md) [c](index.md#none) [d](https://x.y) `docs/none.md`\n```\n[e](none.md)\n```\n"
    monkeypatch.setattr(links, "read", lambda path: text if str(path) == "docs/new.md" else "# Folio\n")
    found = list(links.problems_of(pathlib.Path("docs/new.md"), {"docs/index.md"}))
    assert ["none.md" in found[0], "none.md" in found[1], "#none" in found[2]] == [True] * 3 and len(found) == 3


def test_a_version_has_at_most_40_bullets_of_a_line():
    assert list(changelog.problems_of("## 1\n" + "- a\n" * 40)) == []
    assert len(list(changelog.problems_of("## 1\n" + "- a\n" * 41 + "## 0\n- a\n  b\n"))) == 2


def test_a_decision_has_its_number_a_title_and_a_status(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "ROOT", tmp_path)
    monkeypatch.setattr(decisions, "read", lambda path: path.read_text())
    for text, row in [
            ("# 0007: Why\n\n**Status.** Superseded by [0009](x.md).\n", "| [0007](0007-why.md) | Why | Superseded by 0009 |\n"),
            ("# 0007: Why\n\n**Status.** Maybe.\n", None), ("# 0008: Why\n\n**Status.** Accepted.\n", None),
            ("# 0007: Why\n", None)]:
        (tmp_path / "0007-why.md").write_text(text)
        problems = []
        assert decisions.row_of(tmp_path / "0007-why.md", problems) == row and bool(problems) == (row is None)


def test_the_sites_pages():
    assert hooks.without_outer_links("[a](../README.md#x) [b](../b.md) ![c](../../c.png)", "howto/p.md") == (
        "[a](../README.md#x) [b](../b.md) ![c](../../c.png)")
    assert hooks.without_outer_links("[a](../../README.md#x) [b](../b.md)", "howto/p.md") == "a [b](../b.md)"
    assert hooks.indented("- a\n  - b\n\n```\n  - c\n```") == "- a\n    - b\n\n```\n  - c\n```"
    assert hooks.indented("- a\n  | t |\n  |---|") == "- a\n\n    | t |\n    |---|"
    assert hooks.indented("So:\n- a\n  more\n- b") == "So:\n\n- a\n  more\n- b"
    assert hooks.indented("- a\n\n  more\n  still\n- b") == "- a\n\n    more\n    still\n\n- b"


def test_the_example_of_a_results_file_is_one():
    text = (ROOT / "bench" / "results" / "README.md").read_text()
    assert list(page.problems_of(json.loads(text.split("```json\n")[1].split("```")[0]))) == []
