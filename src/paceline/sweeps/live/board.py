"""A sweep's trials as they are now, read again and again: each look costs what may have changed, and not what is there."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RunNotFoundError
from paceline.runs.folder import RunFolder
from paceline.runs.follow import RunWatch
from paceline.runs.record import RunRecord
from paceline.sweeps.children import child_id, trial_of
from paceline.sweeps.curves import CurveReader
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a sweep stands: its record, what it tries, and its trials in order of their numbers."""

    record: RunRecord
    spec: SweepSpec
    trials: tuple[Trial, ...]


class Board:
    """Reads a sweep as it goes on, beside its controller.

    Raises:
        RunNotFoundError: the sweep is not there.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._watch = RunWatch(folder)
        self._trials: list[Trial] = []
        self._live: dict[int, tuple[RunWatch, CurveReader]] = {}

    def look(self) -> Standing:
        """The sweep as it is now. Its record is read before its trials: those of a sweep that has ended are all there."""
        record = self._watch.look()
        spec = SweepSpec.from_json(record.sweep or {})
        self._take_new(spec)
        for number, (watch, reader) in list(self._live.items()):
            self._trials[number] = trial = trial_of(watch.look(), self._folder.path.parent, spec, reader)
            if trial.is_over:
                del self._live[number]
        return Standing(record=record, spec=spec, trials=tuple(self._trials))

    def _take_new(self, spec: SweepSpec) -> None:
        while True:
            number = len(self._trials)
            child = RunFolder(self._folder.path.parent / child_id(self._folder.run_id, number))
            try:
                watch = RunWatch(child)
            except RunNotFoundError:
                return
            self._live[number] = watch, CurveReader(child.metrics, spec.metric)
            # Filled in by the look that this is a part of.
            self._trials.append(Trial(number=number, run_id=child.run_id))
