"""A trial that runs: its record and its curve, read where they have changed."""

from __future__ import annotations

import contextlib
import dataclasses
import time

from paceline.errors import PacelineError
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader
from paceline.sweeps.trial import Trial

#: How often a record that has not changed is read all the same, to see that somebody still looks after the trial.
_RECORD_S = 1.0


class Watch:
    """Looks at one trial again and again. metric: the primary one."""

    def __init__(self, folder: RunFolder, metric: str) -> None:
        self._folder = folder
        self._curve = CurveReader(folder.metrics, metric)
        self._stamp: tuple[int, int] | None = None
        # So long ago that the first look reads the record at any rate.
        self._read_at = -_RECORD_S

    def look(self, trial: Trial) -> Trial:
        """The trial as it is now; the same object where nothing has changed."""
        status = self._status() or trial.status
        # After the record: what was logged before a run's end is in the curve that is seen with it.
        curve = self._curve.look()
        if (status, len(curve)) == (trial.status, len(trial.curve)):
            return trial
        return dataclasses.replace(trial, status=status, curve=curve)

    def _status(self) -> str | None:
        try:
            found = self._folder.record.stat()
        except OSError:
            return None
        # The inode as well: a record is replaced by a rename, and two writes may fall into one tick of the file system's clock.
        stamp, now = (found.st_mtime_ns, found.st_ino), time.monotonic()
        if stamp == self._stamp and now - self._read_at < _RECORD_S:
            return None
        self._stamp, self._read_at = stamp, now
        with contextlib.suppress(PacelineError, OSError):
            return read.record(self._folder).status
        return None
