#!/usr/bin/env python3
"""Links and paths of the documents lead somewhere: no address of the net is looked at.

Checked are relative links with their anchors, pictures, and what stands in backticks and begins with a directory of ours. An
anchor is a heading's text, lower case, words joined by hyphens. Every page under docs/ is reached from docs/index.md or
mkdocs.yml. tests/seed_map/seed_map.md is left out (check_seed_map.py reads it), and so are placeholders like
src/kernels/cpu/<family>/.
"""

import functools
import pathlib
import posixpath
import re
import sys

from sources import ROOT, project_files, read, report

ROOTS = ("bench", "bindings", "cmake", "docs", "examples", "include", "integrations", "scripts", "src", "tests", "tools")
PATH = re.compile(r"`((?:%s)/[\w./-]*)`" % "|".join(ROOTS))
LINK = re.compile(r"\]\(([^)\s]+)\)")
ADDRESS = re.compile(r"[a-z]+:")
FENCE = re.compile(r"^[ \t]*(```+)[^\n]*\n.*?^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
LEFT_OUT = {pathlib.Path("tests/seed_map/seed_map.md")}
START = "docs/index.md"


def prose(text):
    """The text with fenced blocks emptied; line numbers stay."""
    return FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)


def slug(heading):
    """A heading's anchor, as GitHub and the site make it."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(path):
    """The anchors of a page's headings."""
    seen, found = {}, set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(read(path)), re.MULTILINE):
        name = slug(heading)
        seen[name] = seen.get(name, -1) + 1
        found.add(name if seen[name] == 0 else f"{name}-{seen[name]}")
    return found


def target_of(path, link):
    """(path, anchor) that a page's relative link means."""
    name, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(path.parent.as_posix(), name)) if name else path.as_posix()
    if (ROOT / target / "README.md").is_file():
        target += "/README.md"
    return target, anchor


def problems_of(path, pages):
    for number, line in enumerate(prose(read(path)).splitlines(), 1):
        for name in PATH.findall(line):
            if not (ROOT / name).exists():
                yield f"{path}:{number}: there is no {name}"
        for link in LINK.findall(line):
            if ADDRESS.match(link):
                continue
            target, anchor = target_of(path, link)
            if not (ROOT / target).exists():
                yield f"{path}:{number}: the link to {link} leads nowhere"
            elif anchor and target in pages and anchor not in anchors(target):
                yield f"{path}:{number}: {target} has no heading #{anchor}"


def reached(pages):
    """Pages that links lead to from the first one and from the site's list."""
    listed = {f"docs/{name}" for name in re.findall(r"[\w./-]+\.md", read("mkdocs.yml"))}
    found, open_ = set(), [START, *listed]
    while open_:
        page = open_.pop()
        if page in found or page not in pages:
            continue
        found.add(page)
        open_ += [target_of(pathlib.Path(page), link)[0] for link in LINK.findall(prose(read(page)))]
    return found


def main():
    pages = {path.as_posix() for path in project_files() if path.suffix == ".md" and path not in LEFT_OUT}
    problems = [problem for page in sorted(pages) for problem in problems_of(pathlib.Path(page), pages)]
    problems += [f"{page}: no page leads here from {START}"
                 for page in sorted(pages - reached(pages)) if page.startswith("docs/")]
    return report("links", problems)


if __name__ == "__main__":
    sys.exit(main())
