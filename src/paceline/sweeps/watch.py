"""A trial that runs: its record and its curve, read where they have changed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader, Series
from paceline.sweeps.trial import Trial
from paceline.system.files import read_json

#: How often a record that has not changed is read all the same, to see that somebody still looks after the trial.
_RECORD_S = 1.0
_NOTHING = Series()


class Watch:
    """Looks at one trial again and again.

    folder: of its last run. metrics: the primary one first. earlier: what its runs before have logged of that.
    """

    def __init__(self, folder: RunFolder, metrics: Sequence[str], earlier: Series = _NOTHING) -> None:
        self._folder = folder
        self._earlier = earlier
        self._curve, *self._further = (CurveReader(folder.metrics, metric) for metric in metrics)
        self._record = str(folder.record)
        self._stamp: tuple[int, int] | None = None
        self._read_at = time.monotonic()

    def look(self, trial: Trial) -> Trial:
        """The trial as it is now; the same object where nothing has changed."""
        told = self._changed()
        if told is not None and told["status"] != trial.status:
            started = trial.started_utc if trial.earlier else told.get("started_utc")
            ended = told.get("ended_utc")
            trial = dataclasses.replace(trial, status=told["status"], started_utc=started, ended_utc=ended)
        # After the record: what was logged before a run's end is in the curve that is seen with it.
        if self._further:
            further = tuple(reader.look() for reader in self._further)
            trial = trial if further == trial.further else dataclasses.replace(trial, further=further)
        own = self._curve.look()
        if len(own) == len(trial.curve) - trial.begin:
            return trial
        head = self._earlier.before(self._curve.steps).values if self._earlier.values else ()
        return dataclasses.replace(trial, curve=head + own, begin=len(head))

    def _changed(self) -> Mapping[str, Any] | None:
        """State and times of the record, where it may be another one than at the last look."""
        try:
            found = os.stat(self._record)
        except OSError:
            return None
        # The inode as well: a record is replaced by a rename, and two writes may fall into one tick of the file system's clock.
        stamp, now = (found.st_mtime_ns, found.st_ino), time.monotonic()
        if now - self._read_at >= _RECORD_S:
            self._stamp, self._read_at = stamp, now
            with contextlib.suppress(PacelineError, OSError):
                # Looks whether somebody still cares for the trial, and asks an engine.
                record = read.record(self._folder)
                return {"status": record.status, "started_utc": record.started_utc, "ended_utc": record.ended_utc}
        elif stamp != self._stamp:
            self._stamp = stamp
            told = read_json(self._folder.record)
            return told if isinstance(told, dict) and told.get("status") in states.ALL else None
        return None
