"""A sweep's trials as they are now, read again and again: each look costs what may have changed, and not what is there."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.runs.folder import RunFolder
from paceline.runs.follow import RunWatch
from paceline.runs.record import RunRecord
from paceline.sweeps.children import children, trial_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.sweeps.watch import Watch


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
        self._live: dict[int, Watch] = {}

    def look(self) -> Standing:
        """The sweep as it is now. Its record is read before its trials: those of a sweep that has ended are all there."""
        record = self._watch.look()
        spec = SweepSpec.from_json(record.sweep or {})
        for number, watch in list(self._live.items()):
            self._trials[number] = trial = watch.look(self._trials[number])
            if trial.is_over:
                del self._live[number]
        for record_of_new in children(self._folder, len(self._trials)):
            trial = trial_of(record_of_new, self._folder.path.parent, spec)
            if not trial.is_over:
                child = RunFolder(self._folder.path.parent / trial.run_id)
                self._live[len(self._trials)] = Watch(child, spec.metric)
            self._trials.append(trial)
        return Standing(record=record, spec=spec, trials=tuple(self._trials))
