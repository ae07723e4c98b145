"""What this process' backend has done: for tests, benchmarks and curious engineers."""

from collections import Counter

_done = Counter()


def count(what):
    _done[what] += 1


def counts():
    """Since the process began: `builds` (of a group's metadata, one a step and group), `plans`, `layers` (calls of a
    layer's attention), `writes` (of a layer's keys and values), `kernel NAME` (calls by kernel) and `shared prefixes`
    (builds that found one). A dictionary of integers; what never happened is left out."""
    return dict(_done)
