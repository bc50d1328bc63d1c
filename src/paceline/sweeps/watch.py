"""A trial that runs: its record and its curve, read where they have changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.controlling.child import RecordWatch
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader, Series
from paceline.sweeps.trial import Trial

_NOTHING = Series()


class Watch:
    """Looks at one trial again and again.

    folder: of its last run. metrics: the primary one first. earlier: what its runs before have logged of that.
    """

    def __init__(self, folder: RunFolder, metrics: Sequence[str], earlier: Series = _NOTHING) -> None:
        self._folder = folder
        self._earlier = earlier
        self._curve, *self._further = (CurveReader(folder.metrics, metric) for metric in metrics)
        self._record = RecordWatch(folder)

    def look(self, trial: Trial) -> Trial:
        """The trial as it is now; the same object where nothing has changed."""
        told = self._record.changed()
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
