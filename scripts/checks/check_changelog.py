#!/usr/bin/env python3
"""CHANGELOG.md has at most 40 bullets a version, each on one line."""

import re
import sys

from sources import read, report

MOST = 40


def problems_of(text):
    """What is wrong with a changelog."""
    for version in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name = version.splitlines()[0]
        bullets = re.findall(r"^- .*\n?(?:^ +\S.*\n?)*", version, re.MULTILINE)
        if len(bullets) > MOST:
            yield f"CHANGELOG.md: {name} has {len(bullets)} bullets, more than {MOST}: join some"
        for bullet in bullets:
            if "\n" in bullet.strip():
                yield f"CHANGELOG.md: {name}: more than one line: {bullet.splitlines()[0]}"


def main():
    return report("changelog", list(problems_of(read("CHANGELOG.md"))))


if __name__ == "__main__":
    sys.exit(main())
