"""A sweep's trials as they are now, read again and again: each look costs what may have changed, and not what is there."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.runs.folder import RunFolder
from paceline.runs.follow import RunWatch
from paceline.runs.record import RunRecord
from paceline.sweeps.children import all_runs, has_more, runs_of, trial_of
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import SHOWN_PAUSED, Trial
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
        may_go_on = pausing(spec.stop) is not None
        for number, watch in list(self._live.items()):
            self._trials[number] = trial = watch.look(self._trials[number])
            if trial.is_over:
                del self._live[number]
                if may_go_on:
                    # Whether it was paused stands in its notes, which nobody reads while it runs.
                    self._read_again(number, spec)
        if may_go_on:
            self._look_for_later_runs(spec, has_ended=record.is_terminal)
        for records in all_runs(self._folder, spec, len(self._trials)):
            trial = trial_of(records, self._folder.path.parent, spec)
            self._trials.append(trial)
            self._follow(trial, spec)
        return Standing(record=record, spec=spec, trials=tuple(self._trials))

    def _look_for_later_runs(self, spec: SweepSpec, *, has_ended: bool) -> None:
        for number, trial in enumerate(self._trials):
            # At the sweep's end it is written into the notes of those that wait why they were not gone on with.
            if trial.is_over and (has_more(self._folder, trial) or (has_ended and trial.shown == SHOWN_PAUSED)):
                self._read_again(number, spec)

    def _read_again(self, number: int, spec: SweepSpec) -> None:
        if records := runs_of(self._folder, number):
            self._trials[number] = trial_of(records, self._folder.path.parent, spec)
            self._follow(self._trials[number], spec)

    def _follow(self, trial: Trial, spec: SweepSpec) -> None:
        if not trial.is_over:
            self._live[trial.number] = Watch(trial, self._folder.path.parent, spec)
