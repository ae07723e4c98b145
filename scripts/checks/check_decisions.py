#!/usr/bin/env python3
"""The decisions: numbers without gaps, a title and a status in each, and an index that agrees with them.

A decision is `docs/decisions/NNNN-words.md`. Its first line is `# NNNN: title`, its first paragraph `**Status.** WORD ...`,
WORD being one of STATUSES. The table of docs/decisions/README.md is made from these lines.

usage: check_decisions.py [--write]    --write writes the table
"""

import re
import sys

from sources import ROOT, read, report

FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "README.md"
STATUSES = ("Proposed", "Accepted", "Superseded", "Ended", "Withdrawn")
TITLE = re.compile(r"# (\d{4}): (.+)")
STATUS = re.compile(r"\*\*Status\.\*\* (\w+)(.*)", re.DOTALL)
LINKED = re.compile(r"\[(\d{4})\]")
HEAD = "| number | decision | status |\n|---|---|---|\n"


def paragraphs(text):
    return [each.strip() for each in text.split("\n\n") if each.strip()]


def row_of(path, problems):
    """The decision's row in the index, or None where its file does not say what it should."""
    name, number = path.relative_to(ROOT), path.name[:4]
    title, status = [TITLE.fullmatch(text) if i == 0 else STATUS.match(text)
                     for i, text in enumerate((paragraphs(read(path)) + ["", ""])[:2])]
    if title is None or title[1] != number:
        problems.append(f"{name}: its first line is not '# {number}: title'")
        return None
    if status is None or status[1] not in STATUSES:
        problems.append(f"{name}: below the title stands no '**Status.**' with one of {', '.join(STATUSES)}")
        return None
    by = LINKED.search(status[2]) if status[1] == "Superseded" else None
    return f"| [{number}]({path.name}) | {title[2].rstrip('.')} | {status[1]}{f' by {by[1]}' if by else ''} |\n"


def main():
    problems = []
    files = sorted(FOLDER.glob("[0-9]*.md"))
    numbers = [path.name[:4] for path in files]
    for number in sorted({number for number in numbers if numbers.count(number) > 1}):
        problems.append(f"docs/decisions: {number} is the number of {numbers.count(number)} decisions")
    for number in range(1, int(max(numbers)) + 1):
        if f"{number:04d}" not in numbers:
            problems.append(f"docs/decisions: there is no {number:04d}; one that was given up has a file that says 'Withdrawn'")
    rows = [row for row in (row_of(path, problems) for path in files) if row]
    before, _, table = read(INDEX).partition(HEAD)
    if "--write" in sys.argv[1:]:
        INDEX.write_text(before + HEAD + "".join(rows))
    elif table != "".join(rows):
        problems.append("docs/decisions/README.md: its table is not that of the files: check_decisions.py --write")
    return report("decisions", problems)


if __name__ == "__main__":
    sys.exit(main())
