"""The build backend of this project: scikit-build-core's, which says on the terminal what it builds and how far it is.

pip shows what a backend prints only with -v, or when it failed, and compiling Folio takes minutes. So while a wheel is
built, the lines that CMake begins with "-- folio-attention:" and every tenth of the compiler's progress also go to the
terminal, where there is one. Everything goes where it went before, too.
"""

import contextlib
import os
import re
import sys
import threading

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403: the hooks that are as they were

ANNOUNCED = re.compile(rb"^-- (folio-attention: .*)")
PROGRESS = re.compile(rb"^\[\s*(\d+)(?:/(\d+)|%)\]")  # ninja's [12/345], make's [ 3%]
STEP = 10


class _Terminal:
    """What is said there, line by line of the build's output."""

    def __init__(self, fd):
        self.fd = fd
        self.shown = 0
        self.begin = b"\n"  # pip's line with its spinner is left alone; later lines take the place of the spinner

    def read(self, line):
        announced = ANNOUNCED.match(line)
        if announced:
            self._say(announced[1])
            return
        progress = PROGRESS.match(line)
        if progress:
            done, total = int(progress[1]), int(progress[2] or 100)
            percent = 100 * done // max(total, 1)
            if percent >= self.shown + STEP:
                self.shown = percent - percent % STEP
                self._say(b"folio-attention: compiled %d %%" % self.shown)

    def _say(self, text):
        with contextlib.suppress(OSError):  # a terminal that went away is no reason to stop
            os.write(self.fd, self.begin + b"  " + text + b"\n")
        self.begin = b"\r"


def _copy(source, output, terminal):
    with open(source, "rb") as lines:
        for line in lines:
            with contextlib.suppress(OSError):  # whatever becomes of the output, the build must not wait for a reader
                os.write(output, line)
            terminal.read(line)


@contextlib.contextmanager
def _shown_on_terminal():
    """Standard output also goes to a _Terminal meanwhile, unless it is a terminal itself or there is none."""
    try:
        tty = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY) if not os.isatty(1) else -1
    except OSError:
        tty = -1
    if tty < 0:
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    source, sink = os.pipe()
    os.dup2(sink, 1)
    os.close(sink)
    # A process that outlives the build (a compiler cache's server) may keep the pipe open: wait a moment, not for it.
    copier = threading.Thread(target=_copy, args=(source, output, _Terminal(tty)), daemon=True)
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        copier.join(timeout=5)
        if not copier.is_alive():
            os.close(output)
            os.close(tty)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _shown_on_terminal():
        return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with _shown_on_terminal():
        return _backend.build_editable(wheel_directory, config_settings, metadata_directory)
