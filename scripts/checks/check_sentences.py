#!/usr/bin/env python3
"""The sentences of every page under docs/, and of the pages a visitor reads first, have fewer than 18 words on average.

Prose is what remains without code blocks, tables, headings and comments. A sentence ends at a full stop, a question or an
exclamation mark, or where its paragraph or list item ends. What stands in backticks is one word. Pages with fewer than
three sentences have no average.

usage: check_sentences.py [--list]    --list prints the average of every page, the longest first
"""

import re
import statistics
import sys

from sources import project_files, read, report

LIMIT = 18
FIRST_PAGES = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
ENOUGH = 3

FENCE = re.compile(r"^([ \t]*)(```+|~~~+)[^\n]*\n.*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"^\s*(\||#|<|!\[|---|\[[^\]]+\]:)|^ {4,}(?![-*\d])\S")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
END = re.compile(r"[.!?](?=[\"')*_]*(?:\s|$))")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|al|Fig|No|St)\.$")


def paragraphs(text):
    """Paragraphs and list items of a page's prose, each on one line."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    lines = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or NOT_PROSE.match(line) or ITEM.match(line):
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() and not NOT_PROSE.match(line):
            lines.append(ITEM.sub("", line).strip().lstrip("> "))


def sentences(paragraph):
    paragraph = re.sub(r"`[^`]*`", "code", paragraph)
    paragraph = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    begin = 0
    for end in END.finditer(paragraph):
        if not ABBREVIATION.search(paragraph[:end.end()]):
            yield paragraph[begin:end.end()]
            begin = end.end()
    yield paragraph[begin:]


def words(sentence):
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def lengths(text):
    counts = [words(sentence) for paragraph in paragraphs(text) for sentence in sentences(paragraph)]
    return [count for count in counts if count]


def pages():
    return [path for path in project_files()
            if path.suffix == ".md" and (path.parts[0] == "docs" or path.as_posix() in FIRST_PAGES)]


def main():
    averages = {}
    for path in pages():
        counts = lengths(read(path))
        if len(counts) >= ENOUGH:
            averages[path] = statistics.mean(counts)
    if "--list" in sys.argv[1:]:
        for path, average in sorted(averages.items(), key=lambda each: -each[1]):
            print(f"{average:5.1f}  {path}")
    return report("sentences", [f"{path}: {average:.1f} words a sentence on average, {LIMIT} or more"
                                for path, average in averages.items() if average >= LIMIT])


if __name__ == "__main__":
    sys.exit(main())
