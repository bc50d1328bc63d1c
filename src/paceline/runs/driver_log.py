"""The log of a run's supervisor, and of the controllers of sweeps, pipelines and services."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write a line with the time to the driver's log."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    try:
        print(f"{stamp}Z {text}", flush=True)
    except OSError:
        # After an error the line stays in Python's buffer, and writing it again at exit would fail too.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
