"""The command `folio` of an installed wheel: runs the program that lies inside the package."""

import os
import pathlib
import sys

_PACKAGE = pathlib.Path(__file__).resolve().parent
PROGRAM = _PACKAGE / "bin" / "folio"
TRACE = _PACKAGE / "traces" / "mooncake_excerpt.jsonl"


def main():
    """Becomes the program. Without a trace of its own, `folio replay` takes the excerpt that the wheel brings."""
    if not PROGRAM.exists():
        sys.exit("folio: this build of the package has no program. A wheel has it; in the sources: FOLIO_BUILD_TOOLS=ON pip install .")
    os.environ.setdefault("FOLIO_TRACE", str(TRACE))
    os.execv(PROGRAM, ["folio", *sys.argv[1:]])
