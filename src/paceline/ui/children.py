"""Child processes that parse untrusted files for the page, within a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.system import processes

#: Limits the number of child processes that run at the same time.
_AT_ONCE = threading.Semaphore(4)
_CHECK_S = 0.2  # seconds between checks whether the client is still connected


def output_of(
    words: Sequence[str], limit_s: float, check_reader: Callable[[], None], *, stdin: int = subprocess.DEVNULL
) -> bytes:
    """Run a module of Paceline in a child process, and return its output.

    Args:
        words: The module's name and its arguments.
        limit_s: Time limit in seconds. It counts from the start of the process, which may first wait in a queue.
        check_reader: Called repeatedly. If the browser has disconnected, it raises an error, which kills the process.
        stdin: Descriptor for the standard input.

    Raises:
        subprocess.TimeoutExpired: The process took longer.
    """
    # Set PYTHONPATH, so that Python does not import modules from the current folder, which may contain a user's script.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    while not _AT_ONCE.acquire(timeout=_CHECK_S):
        check_reader()
    try:
        end_s = time.monotonic() + limit_s
        with subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd="/",
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The kernel kills the child process if this thread ends. This thread waits for the child, so it does not end earlier.
            preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509
        ) as child:
            try:
                while True:
                    try:
                        return child.communicate(timeout=min(_CHECK_S, limit_s))[0]
                    except subprocess.TimeoutExpired:
                        check_reader()
                        if time.monotonic() > end_s:
                            raise
            finally:
                child.kill()
    finally:
        _AT_ONCE.release()
