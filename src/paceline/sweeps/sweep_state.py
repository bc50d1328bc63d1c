"""What a controller knows of its sweep while it goes on; the parts of a controller share it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

from paceline.children.child import never_began
from paceline.errors import PacelineError
from paceline.runs import removal, states, store
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader, Watch
from paceline.sweeps.samplers.sampler import Proposal
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.sweeps.trial_runs import child_folder, keep, read_trials


class SweepState:
    """The sweep's record, and its trials as they were seen last. For the holder of its lock.

    trials: by number. live: the numbers of those that are not over. cut_off: those of them that were never handed over, for
    their submission was killed. pending: what has been proposed already for the next trials. is_exhausted: there is no further
    point to try.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = store.stored(folder)
        assert self.record.sweep is not None, "its kind is sweep"
        assert self.record.job is not None, "a sweep has the job of its trials"
        self.spec = SweepSpec.from_json(self.record.sweep)
        self.job = self.record.job
        self.trials: list[Trial] = []
        self.live: dict[int, Watch] = {}
        self.cut_off: set[int] = set()
        self._cut_off_once: set[int] = set()
        self.pending: list[Proposal] = []
        # A sampler that has nothing left stays so: of a grid or a small space every point has been proposed.
        self.is_exhausted = False
        #: Grows with each trial that begins, goes on or ends: what was found out about them holds until then.
        self.changes = 0
        #: Why the sweep is to end as failed, and the changes after which that was found out.
        self.failure: str | None = None
        self.judged: tuple[int, bool] | None = None
        #: Of runs that were paused, whether they have left a checkpoint.
        self.has_checkpoint: dict[str, bool] = {}

    def folder_of(self, number: int) -> RunFolder:
        """The folder of a trial's last run."""
        return RunFolder(self.runs_dir / self.trials[number].run_id)

    def former(self, number: int) -> RunFolder | None:
        """The folder of the former sweep's trial that a trial goes on from; None where it begins anew."""
        resumed = self.spec.resumed
        return RunFolder(self.runs_dir / resumed[number]) if number < len(resumed) else None

    def next_folder(self, number: int) -> RunFolder:
        """The folder of a trial's next run, of its first one too."""
        leg = len(self.trials[number].earlier) + 2 if number < len(self.trials) else 1
        return child_folder(self.folder, number, leg)

    @property
    def runs_dir(self) -> Path:
        return self.folder.path.parent

    @property
    def is_done(self) -> bool:
        """No further trial will begin."""
        return self.is_exhausted or len(self.trials) >= self.spec.trials

    def take_up(self) -> None:
        """Read the children that are there; those that were being made when an earlier controller died are made again."""
        # A kill in the midst of a submission leaves the hidden folder, and `store.create` refuses to make one that is there.
        for hidden in self.runs_dir.glob(f"{removal.NEW}{self.folder.run_id}_*"):
            shutil.rmtree(hidden, ignore_errors=True)
        for trial, runs in read_trials(self.folder, self.spec):
            self.add(trial, was_cut_off=bool(runs) and never_began(runs[-1]))
            if runs and self.trials[-1].is_over:
                keep(self.folder, self.trials[-1])
        if self.trials:
            say(f"going on with {len(self.trials)} trials, of which {len(self.live)} run")

    def add(self, trial: Trial, *, was_cut_off: bool = False) -> None:
        """A trial that is there from now on."""
        assert trial.number == len(self.trials), "numbers are given out one after the other"
        if was_cut_off:
            self._cut_off_once.add(trial.number)
            self.cut_off.add(trial.number)
            trial = dataclasses.replace(trial, status=states.NOT_STARTED)
        self.trials.append(trial)
        self._watch(trial)

    def go_on(self, trial: Trial) -> None:
        """A trial that has one more run from now on."""
        self.trials[trial.number] = trial
        self._cut_off_once.discard(trial.number)
        self._watch(trial)

    def _watch(self, trial: Trial) -> None:
        self.changes += 1
        if not trial.is_over:
            self.live[trial.number] = Watch(trial, self.runs_dir, self.spec)

    def look(self) -> list[Trial]:
        """Bring the trials up to date; those whose curve or state has changed."""
        changed: list[Trial] = []
        # Over a copy: trials that have ended are taken out on the way.
        for number, watch in list(self.live.items()):
            if number in self.cut_off:
                continue
            after = watch.look(self.trials[number])
            if after is self.trials[number]:
                continue
            # An engine may take a while to know that it was never given the run.
            if after.status == states.FAILED and self._was_cut_off(number):
                self._cut_off_once.add(number)
                self.cut_off.add(number)
                continue
            changed.append(after)
            self.trials[number] = after
            if after.is_over:
                del self.live[number]
                self.changes += 1
                keep(self.folder, after)
        return changed

    def give_up_cut_off(self) -> None:
        """Let the trials that were never handed over be as their records say: the sweep ends."""
        for number in self.cut_off:
            self.trials[number] = dataclasses.replace(self.trials[number], status=states.FAILED)
            del self.live[number]
        self.cut_off.clear()

    def _was_cut_off(self, number: int) -> bool:
        folder = self.folder_of(number)
        # A second time it is not a kill that keeps the run from its start.
        if number not in self._cut_off_once and not folder.cancel_request.exists():
            with contextlib.suppress(PacelineError):
                return never_began(store.stored(folder))
        return False

    def warn(self, text: str) -> None:
        """Say it, and write it down in the sweep's record."""
        say(f"warning: {text}")
        self.note(warnings=(*self.record.warnings, text))

    def wait_for(self, text: str | None) -> None:
        """Write down what the sweep waits for; None for nothing."""
        if text != self.record.waiting_for:
            self.note(waiting_for=text)

    def note(self, **changes: Any) -> None:
        """Write these changes into the sweep's record."""
        self.record = dataclasses.replace(self.record, **changes)
        store.write(self.folder, self.record)

    def no_metric(self, trial: Trial) -> str:
        """What is said of a trial that has ended without a value of the primary metric, or of another one of several."""
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
