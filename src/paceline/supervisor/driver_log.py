"""The supervisor's own words, in `logs/driver.log`, which is its standard output."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write one line with the time in front. A full disk silences it, no more."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    try:
        print(f"{stamp}Z {text}", flush=True)
    except OSError:
        # Python would try again at exit, and fail there.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
