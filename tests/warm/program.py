"""Loads what it is told, and forks for each script that somebody asks for at its socket (`hand_over.ask`). It ends when its
standard input does, and so with whoever has started it, however that ends.

    whoever asks                      this program                     a fork
    "start", what is told, fds  ──>   fork ─────────────────────────>  runs the script with these fds
                                <──   its pid
    closes it, or ends          ──>   kills it, with its group
                                <──   its exit code, at its end
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

# From this folder, for the package would load what only those need who ask.
from as_main import run
from asked import listening, take, taken_over, tell
from asking import submit_with
from hand_over import ask
from hiding import Hiding


def serve(path: str) -> dict[str, Any]:
    """Take scripts until standard input ends. Returns in each child, with what it was told."""
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of the process -> pid, connection
    listener = listening(path)
    try:
        while True:
            asked = {connection.fileno(): pid for pid, connection in running.values()}
            ready, _, _ = select.select([0, listener, *running, *asked], [], [])
            if 0 in ready:
                break
            for fd in set(ready) & set(asked):
                # Whoever has started it wants its end, or is gone.
                kill(asked[fd])
            for fd in set(ready) & set(running):
                pid, connection = running.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                tell(connection, os.waitstatus_to_exitcode(status))
                connection.close()
            if listener in ready:
                connection, _ = listener.accept()
                fds = take(connection)
                if not fds:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for one in (listener, connection, *(one for _, one in running.values())):
                        one.close()
                    # Those of the parent are none of its.
                    running.clear()
                    os.setpgid(0, 0)
                    return taken_over(fds)
                # Whichever of both is first: whoever hears of it may signal the group.
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)
                for fd in fds:
                    os.close(fd)
                running[os.pidfd_open(pid)] = (pid, connection)
                tell(connection, pid)
    finally:
        for pid, _ in running.values():
            kill(pid)
            os.waitpid(pid, 0)
    # At once: the interpreter would free all that is loaded, object by object.
    os._exit(0)


def kill(pid: int) -> None:
    """End a child, and what it has started."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def leave() -> None:
    """Go on below no process that a test has, and print the pid."""
    if pid := os.fork():
        print(pid, flush=True)
        os._exit(0)
    # Whoever reads the pid waits for the end of what is printed there.
    os.dup2(2, 1)


if __name__ == "__main__":
    if sys.argv[-1] == "--apart":
        sys.argv.pop()
        leave()
    # A signal for the group of whoever has started it, as `timeout` sends one, would end it before it has ended its children.
    os.setsid()
    # A child has the folder of its script in this place, and no more modules of these names than another process.
    sys.path[0] = str(Path(__file__).parents[2])
    for name in ("as_main", "asked", "asking", "hand_over", "hiding"):
        del sys.modules[name]
    hiding = Hiding()
    with warnings.catch_warnings():
        # As for a script: the filters are those of the interpreter, and the script sets its own.
        warnings.simplefilter("ignore")
        for name in sys.argv[2:]:
            hiding.load(name)
    # What is loaded stays: children's collections pass it over, which would touch, and so copy, all its pages.
    gc.collect()
    gc.freeze()
    # As in pytest's processes (tests/conftest.py): a fourth of what a world of ranks computed was the looking for garbage.
    gc.set_threshold(10_000, 50, 1_000)
    told = serve(sys.argv[1])
    # Each process has its own, unless it asks for a seed.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if told["supervisors"]:
        submit_with(ask, *told["supervisors"])
    if told["hides"]:
        hiding.hide()
    run(told)
