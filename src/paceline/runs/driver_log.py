"""What a run's supervisor, and the process that controls a sweep, a pipeline or a service, write into their own log."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write one line into the driver's log, with the time in front. A full disk silences it and does nothing worse."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    try:
        print(f"{stamp}Z {text}", flush=True)
    except OSError:
        # The line stays in Python's buffer: the interpreter would try to write it again at exit, and fail there.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
