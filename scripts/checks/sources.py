"""What the checks share: which files the project has, and their text without comments and string literals."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP_SUFFIXES = {".hpp", ".cc", ".h", ".c", ".cu", ".cuh"}


def project_files():
    """Paths of the files under version control, and of new ones that are not ignored, relative to the root."""
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                             capture_output=True, text=True)
    return [pathlib.Path(line) for line in sorted(set(listing.stdout.splitlines())) if (ROOT / line).is_file()]


def cpp_files():
    return [path for path in project_files() if path.suffix in CPP_SUFFIXES]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def is_test(path):
    return path.stem.endswith(("_test", "_test_util")) or path.parts[0] == "tests"


_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def code_only(text):
    """The text with comments and literals emptied; line numbers stay. (A digit separator, 1'000, is not a literal.)"""
    text = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "", text)
    return _TOKEN.sub(lambda match: "\n" * match.group().count("\n"), text)


def report(name, problems):
    """Prints the problems, one a line, and returns the exit status."""
    for problem in problems:
        print(problem)
    print(f"{name}: {len(problems)} problem(s)" if problems else f"{name}: ok")
    return 1 if problems else 0
