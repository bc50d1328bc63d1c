"""Has loaded what supervisors and controllers load, and forks for each that is asked for at its socket (`supervisors.py`). It
ends when its standard input does.

    ROOM=... supervising.py SOCKET ROOM      ROOM: as long as the longest that a fork has for variables, and as a command line

What is asked for comes as a file and descriptors; the answer is the pid. A fork shows in /proc under the command line and the
variables of a supervisor that was started, for by these the library finds supervisors and the processes of runs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import time
from typing import Any

# From this folder, where a supervisor looks for nothing.
from asked import listening, take, taken_over, tell
from asking import MODULES, alike, submit_with
from hand_over import ask

sys.path.pop(0)

import paceline.launchers.processes
import paceline.targets.local  # noqa: F401 - as all here, it is there to be loaded

MAINS = {module: importlib.import_module(f"{module}.__main__").main for module in MODULES}


def serve(path: str) -> dict[str, Any]:
    """Fork until standard input ends. Returns in each child, with what it was told."""
    listener = listening(path)
    # Nobody waits for a child, as nobody waits for a supervisor whose program has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while 0 not in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        fds = take(connection)
        if fds and not (pid := os.fork()):
            told = taken_over(fds)
            # They are closed, and would close what is open under their numbers now.
            listener.detach()
            connection.detach()
            return told
        for fd in fds:
            os.close(fd)
        if fds:
            tell(connection, pid)
        connection.close()
    os._exit(0)


def show(words: list[str], environment: dict[str, str]) -> None:
    """Put the command line and the variables where /proc reads them."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    words_from, words_to, variables_from, variables_to = map(int, fields[45:49])
    # Else what C has kept of the old ones would point into the new.
    os.environ.clear()
    for texts, start, end in (
        (words, words_from, words_to),
        ([f"{name}={value}" for name, value in environment.items()], variables_from, variables_to),
    ):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(block) < end - start, "the room for it is too small"
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, block, len(block))
    os.environ.update(environment)


if __name__ == "__main__":
    for name in ("asked", "asking", "hand_over"):
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    own = sys.argv[1]
    told = serve(own)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    show(told["words"], told["environment"])
    time.tzset()
    os.chdir(told["folder"])
    os.umask(told["umask"])
    sys.argv = told["words"][2:]
    # As `python -m` has it, which looks in the current folder first.
    sys.path[:0] = [told["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # The supervisors of what a controller submits.
    submit_with(ask, own, alike(os.environ))
    try:
        code = MAINS[told["words"][2]](sys.argv[1:])
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: the interpreter would free all that is loaded, and so copy it first.
    os._exit(code)
