"""The state of a sweep that its controller keeps."""

from __future__ import annotations

import dataclasses
import shutil

from paceline.children.child import is_cut_off, never_began
from paceline.children.engine import ParentState
from paceline.runs import removal, states
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader, Watch
from paceline.sweeps.samplers.sampler import Proposal
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.sweeps.trial_runs import child_folder, keep, read_trials


class SweepState(ParentState):
    """A sweep's record and trials, for the process with the sweep's lock.

    Attributes:
        trials: All trials, in the order of their numbers.
        cut_off: Numbers of live trials whose submission was interrupted and must be repeated.
        pending: Proposed points that are not submitted yet.
        is_exhausted: Whether the space has no further point.
        changes: Number of times that a trial began, continued or ended. If it has grown, earlier derived data is stale.
        failure: The reason why the sweep must fail, or None.
        judged: The values of (`changes`, `is_done`) when `failure` was last computed; None before that.
        has_checkpoint: Whether each paused run has left a checkpoint, by run id.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        assert self.record.sweep is not None, "its kind is sweep"
        assert self.record.job is not None, "a sweep has the job of its trials"
        self.spec = SweepSpec.from_json(self.record.sweep)
        #: The job of the trials. Trials send no notifications; only the sweep does.
        self.job = dataclasses.replace(self.record.job, notify=())
        self.trials: list[Trial] = []
        self._live: dict[int, Watch] = {}
        self.cut_off: set[int] = set()
        self._cut_off_once: set[int] = set()
        self.pending: list[Proposal] = []
        # Whether the sampler has no more points. Never reset, because all points of the space have been proposed.
        self.is_exhausted = False
        self.changes = 0
        self.failure: str | None = None
        self.judged: tuple[int, bool] | None = None
        self.has_checkpoint: dict[str, bool] = {}

    def folder_of(self, number: int) -> RunFolder:
        """Return the folder of a trial's last run."""
        return RunFolder(self.runs_dir / self.trials[number].run_id)

    def former(self, number: int) -> RunFolder | None:
        """Return the former sweep's run that this trial resumes, or None."""
        resumed = self.spec.resumed
        return RunFolder(self.runs_dir / resumed[number]) if number < len(resumed) else None

    def next_folder(self, number: int) -> RunFolder:
        """Return the folder of a trial's next run."""
        leg = len(self.trials[number].earlier) + 2 if number < len(self.trials) else 1
        return child_folder(self.folder, number, leg)

    @property
    def live(self) -> dict[int, Watch]:
        """The reader of changes (`Watch`) of each live trial, by trial number."""
        return self._live

    @property
    def is_done(self) -> bool:
        """Whether no new trial will begin."""
        return self.is_exhausted or len(self.trials) >= self.spec.trials

    def take_up(self) -> None:
        """Read the trials that exist on disk, and remove unfinished run folders."""
        # Remove hidden folders of killed submissions: while such a folder exists, `store.create` can't create the run.
        for hidden in self.runs_dir.glob(f"{removal.NEW}{self.folder.run_id}_*"):
            shutil.rmtree(hidden, ignore_errors=True)
        for trial, runs in read_trials(self.folder, self.spec):
            self.add(trial, was_cut_off=bool(runs) and never_began(runs[-1]))
            if runs and self.trials[-1].is_over:
                keep(self.folder, self.trials[-1])
        if self.trials:
            say(f"going on with {len(self.trials)} trials, of which {len(self._live)} run")

    def add(self, trial: Trial, *, was_cut_off: bool = False) -> None:
        """Add a new trial, whose submission may have been interrupted (`was_cut_off`)."""
        assert trial.number == len(self.trials), "numbers are given out one after the other"
        if was_cut_off:
            self._cut_off_once.add(trial.number)
            self.cut_off.add(trial.number)
            trial = dataclasses.replace(trial, status=states.NOT_STARTED)
        self.trials.append(trial)
        self._watch(trial)

    def go_on(self, trial: Trial) -> None:
        """Replace a trial in the list by `trial`, which has one more run."""
        self.trials[trial.number] = trial
        self._cut_off_once.discard(trial.number)
        self._watch(trial)

    def _watch(self, trial: Trial) -> None:
        self.changes += 1
        if not trial.is_over:
            self._live[trial.number] = Watch(trial, self.runs_dir, self.spec)

    def look(self) -> list[Trial]:
        """Read the live trials' changes. Return trials with a new status or new values."""
        changed: list[Trial] = []
        # Iterate over a copy, because the loop removes trials that have ended.
        for number, watch in list(self._live.items()):
            if number in self.cut_off:
                continue
            after = watch.look(self.trials[number])
            if after is self.trials[number]:
                continue
            # Repeat an interrupted submission only once: the submission itself may be what kills the controller.
            if (
                after.status == states.FAILED
                and number not in self._cut_off_once
                and is_cut_off(self.folder_of(number))
            ):
                self._cut_off_once.add(number)
                self.cut_off.add(number)
                continue
            changed.append(after)
            self.trials[number] = after
            if after.is_over:
                del self._live[number]
                self.changes += 1
                keep(self.folder, after)
        return changed

    def give_up_cut_off(self) -> None:
        """Mark trials whose submission was interrupted as Failed."""
        for number in self.cut_off:
            self.trials[number] = dataclasses.replace(self.trials[number], status=states.FAILED)
            del self._live[number]
        self.cut_off.clear()

    def warn(self, text: str) -> None:
        """Log a warning and add it to the sweep's record."""
        say(f"warning: {text}")
        self.note(warnings=(*self.record.warnings, text))

    def no_metric(self, trial: Trial) -> str:
        """Return a warning that a trial has logged no value of the metric."""
        missing = [metric for metric, curve in zip(self.spec.metrics, trial.curves, strict=False) if not curve]
        names = sorted(CurveReader(self.folder_of(trial.number).metrics, self.spec.metric).names)
        logged = (
            f"It logged {', '.join(names)}" if names else "It logged nothing: call run.log(name, value) in the script"
        )
        metric = (
            f"the primary metric {self.spec.metric!r}"
            if self.spec.metric in missing
            else f"the metric {(missing or self.spec.metrics)[0]!r}"
        )
        return f"trial {trial.number} has ended without a value of {metric}. {logged}."
