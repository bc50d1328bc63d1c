"""Waiting for something that MPI does not call back about: looks without a pause, then ever longer sleeps between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from paceline.collectives.errors import CollectivesError

#: Guesses, as are the numbers of looks.
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3


def wait_until(look: Callable[[], bool], limit_s: float, late: str, *, looks: int) -> None:
    """Return once `look()` is true.

    looks: so many without a sleep in between.

    Raises:
        CollectivesError: it is not within `limit_s`; "waited {limit_s} s {late}".
    """
    for _ in range(looks):
        if look():
            return
        # Where ranks share cores, the one that is waited for needs this one.
        os.sched_yield()
    end = time.monotonic() + limit_s
    sleep_s = SHORTEST_SLEEP_S
    while not look():
        if time.monotonic() > end:
            raise CollectivesError(f"waited {limit_s:g} s {late}")
        time.sleep(sleep_s)
        sleep_s = min(sleep_s * 1.05, LONGEST_SLEEP_S)
