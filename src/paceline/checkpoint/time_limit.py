"""The end of the time that a run or an engine's job has, as far as a worker can know it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from paceline.checkpoint.leaving import LIMIT

#: Unix seconds: of the run (max_run_duration_seconds), of the Slurm job.
VARIABLES = ("PACELINE_END_TIME", "SLURM_JOB_END_TIME")
#: Beside what steps and saves were seen to take. A guess.
_SPARE_S = 10.0


class TimeLimit:
    """Says once that it is time to save: when the next call of save() might come too late.

    The next call comes after the longest time that lay between two so far, and a save takes as long as the longest did;
    both are counted twice.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._last: float | None = None
        self._longest_s = self._save_s = 0.0
        self._is_said = False

    def asked(self, now: float | None = None) -> str | None:
        """LIMIT where a save is due now. Called once at each call of save()."""
        now = time.time() if now is None else now
        if self._last is not None:
            self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        end = self._end()
        if end is None or self._is_said or now < end - 2 * (self._longest_s + self._save_s) - _SPARE_S:
            return None
        self._is_said = True
        return LIMIT

    def took(self, seconds: float) -> None:
        """A save took so long."""
        self._save_s = max(self._save_s, seconds)

    def _end(self) -> float | None:
        found = []
        for name in VARIABLES:
            text = self._environment.get(name, "")
            if text.replace(".", "", 1).isdigit():
                found.append(float(text))
        return min(found, default=None)
