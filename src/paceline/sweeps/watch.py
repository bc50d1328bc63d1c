"""A trial that runs: its record and its curve, read where they have changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.controlling.child import RecordWatch
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader, Series
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial


class Watch:
    """Looks again and again at one trial, which runs."""

    def __init__(self, trial: Trial, runs_dir: Path, spec: SweepSpec) -> None:
        folder = RunFolder(runs_dir / trial.run_id)
        #: What its runs before have logged of the primary metric.
        self._earlier = Series()
        for leg in trial.earlier:
            self._earlier = self._earlier.then(CurveReader(RunFolder(runs_dir / leg.run_id).metrics, spec.metric))
        self._curve, *self._further = (CurveReader(folder.metrics, metric) for metric in spec.metrics)
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
