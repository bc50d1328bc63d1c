"""The log of a run's supervisor, and of the controllers of sweeps, pipelines and services."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write a line with the time to the supervisor's or controller's log."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    try:
        print(f"{stamp}Z {text}", flush=True)
    except OSError:
        # Replace sys.stdout: its buffer still has the line, which Python's flush at exit would fail to write again.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
