"""The list of tests that are left out: a line each, a pattern of the test's name (fnmatch), two spaces, the reason.

A test's name is file::test[values], and also file::test(argument=value, ...): the pattern matches either.
"""

import fnmatch
import os
import pathlib
import zlib

import pytest
import torch


def read():
    lines = pathlib.Path(os.environ["FOLIO_PEER_SKIPS"]).read_text().splitlines()
    return [tuple(line.split("  ", 1)) for line in lines if line and not line.startswith("#")]


def names_of(item):
    """A test's names behind the last directory."""
    name = item.nodeid.rpartition("/")[2]
    if not hasattr(item, "callspec"):
        return name,
    given = ", ".join(f"{argument}={value}" for argument, value in item.callspec.params.items())
    return name, f"{name.partition('[')[0]}({given})"


def mark(items):
    """Marks the listed tests among pytest's items."""
    skips = [(pattern.replace("[", "[[]"), reason) for pattern, reason in read()]
    for item in items:
        names = names_of(item)
        for pattern, reason in skips:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                item.add_marker(pytest.mark.skip(reason=reason.strip()))
                break


def choose(config, items):
    """Leaves one in FOLIO_PEER_ONE_IN among pytest's items, by their names: the same ones every time.

    Of each test function at least one case stays, which is not on the list if there is one: those that check arguments
    have few.
    """
    one_in = int(os.environ.get("FOLIO_PEER_ONE_IN", "1"))
    numbers = {item: zlib.crc32(item.nodeid.rpartition("/")[2].encode()) for item in items}
    listed = {item: item.get_closest_marker("skip") is not None for item in items}
    functions = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {min(cases, key=lambda item: (listed[item], numbers[item])) for cases in functions.values()
            if all(numbers[item] % one_in or listed[item] for item in cases)}
    chosen = [item for item in items if item in kept or numbers[item] % one_in == 0]
    if len(chosen) < len(items):
        left_out = set(items).difference(chosen)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = chosen


def give_memory_back():
    """After a test: several processes share a GPU, and torch keeps what a test has freed."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()
