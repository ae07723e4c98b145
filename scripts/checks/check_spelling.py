#!/usr/bin/env python3
"""codespell finds no misspelt word in the documents."""

import shutil
import subprocess
import sys

from sources import ROOT, project_files, report


def main():
    if shutil.which("codespell") is None:
        return report("spelling", ["codespell is not installed: scripts/install_deps.sh checks"])
    pages = [str(path) for path in project_files() if path.suffix == ".md"]
    known = "crate"  # a Rust package, which codespell takes for "create"
    found = subprocess.run(["codespell", "--ignore-words-list", known, *pages], cwd=ROOT, capture_output=True, text=True, check=False)
    return report("spelling", (found.stdout + found.stderr).splitlines())


if __name__ == "__main__":
    sys.exit(main())
