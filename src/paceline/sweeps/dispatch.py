"""Submission of a sweep's trials, up to the limit of concurrent trials."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

from paceline.children.retries import STOPPED, Refusals
from paceline.errors import EngineError
from paceline.job.data_reference import MODEL_LOCATION, DataReference, Source
from paceline.job.job import Job
from paceline.runs import tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.runs.record import TrialEntry
from paceline.submit import NewRun, SourceCopy, Submission, in_places_of, prepare, submit_again, unrecorded, values_of
from paceline.sweeps import results
from paceline.sweeps.points import job_of
from paceline.sweeps.policies.pausing import budget, pausing
from paceline.sweeps.samplers.samplers import Proposals
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Next, Trial
from paceline.sweeps.warm_start import prior_trials
from paceline.system.files import read_json
from paceline.targets.base import ALIKE_SPAN

#: Number of paused trials without a checkpoint after which a sweep fails.
_WITHOUT = 3


class Dispatcher:
    """A dispatcher that submits the trials of a sweep.

    Args:
        clock: Returns the time in monotonic seconds.
    """

    def __init__(self, sweep: SweepState, clock: Callable[[], float] = time.monotonic) -> None:
        self._sweep = sweep
        self._secrets: dict[str, str] = read_json(sweep.folder.secrets) or {}
        self._snapshot = sweep.folder.snapshot.resolve()
        prior = prior_trials(sweep.folder, sweep.spec)
        if prior:
            say(f"{len(prior)} results of former sweeps are known: {', '.join(sweep.spec.warm_start)}")
        self._proposals = Proposals(sweep.spec, self._snapshot, prior)
        self._refusals = Refusals(sweep.record.target, clock)
        self._submission: Submission | None = None

    def fill(self) -> None:
        """Submit trials up to the limit `concurrent`, paused trials first.

        Raises:
            PacelineError: A trial cannot be submitted, or the engine (such as Slurm) has refused trials for an hour.
        """
        sweep = self._sweep
        while self._refusals.may_ask:
            if sweep.cut_off:
                number = min(sweep.cut_off)
                self._hand_over(number, functools.partial(self._start_again, number), [])
                continue
            if len(sweep.live) >= sweep.spec.concurrent:
                return
            following = next_run(sweep)
            if following is not None:
                begun = [sweep.next_folder(following.number)]
                self._hand_over(following.number, functools.partial(self._go_on, following), begun)
            elif sweep.is_done:
                self._taken()
                return
            elif trials := self._next(count := self._count()):
                begun = [sweep.next_folder(trial.number) for trial in trials]
                self._hand_over(trials[0].number, functools.partial(self._start, trials), begun)
            elif not count:
                return

    @property
    def is_waiting(self) -> bool:
        """Whether a trial that the target refused must be submitted again."""
        return self._refusals.is_waiting

    def _hand_over(self, number: int, start: Callable[[], None], begun: list[RunFolder]) -> None:
        """Submit trials by calling `start`. If Slurm, for example, refuses, remove their folders.

        A later call of `fill` repeats a refused submission. begun: The folders. number: The first trial's number.
        """
        sweep = self._sweep
        sweep.check()
        try:
            start()
        except EngineError as error:
            # Forget the target's settings, which this submission has read: the user may change them before the next attempt.
            self._submission = None
            # Remove the folders from the last to the first: readers stop at the first missing number, so no gap may arise.
            sweep.refused(
                f"trial {number}",
                reversed(begun),
                self._refusals,
                error,
                f" Once it does again: paceline sweep more {sweep.folder.run_id} --trials N",
            )
        else:
            self._taken()

    def _taken(self) -> None:
        self._refusals.taken()
        self._sweep.wait_for(None)

    def _count(self) -> int:
        sweep = self._sweep
        number, spec = len(sweep.trials), sweep.spec
        if spec.array_size is None:
            return 1
        count = min(spec.array_size, spec.trials - number, ALIKE_SPAN - number % ALIKE_SPAN)
        # An engine limits only the trials of one job array. Submit one if no trial is live, or if all fit the limit.
        return count if not sweep.live or len(sweep.live) + count <= spec.concurrent else 0

    def _next(self, count: int) -> list[Trial]:
        sweep = self._sweep
        known = list(sweep.trials)
        for ahead in range(count):
            number = len(known)
            # Keep the points of a refused submission, because the sampler would not propose them again.
            if ahead == len(sweep.pending):
                proposal = self._proposals.propose(number, known)
                if proposal is None:
                    sweep.is_exhausted = True
                    say(f"the space has no further point: {number} trials in all")
                    break
                sweep.pending.append(proposal)
            chosen, notes = sweep.pending[ahead].chosen, sweep.pending[ahead].notes
            run_id, values = sweep.next_folder(number).run_id, sweep.spec.space.values(chosen)
            known.append(Trial(number=number, run_id=run_id, chosen=chosen, values=values, notes=notes))
        return known[len(sweep.trials) :]

    def _start(self, trials: list[Trial]) -> None:
        sweep = self._sweep
        runs = []
        for trial in trials:
            entry: TrialEntry = {"number": trial.number, "chosen": dict(trial.chosen), "values": dict(trial.values)}
            if trial.notes:
                entry["notes"] = dict(trial.notes)
            runs.append(self._run(trial.run_id, entry, 0, sweep.former(trial.number)))
        submission = self._prepared(runs[0].job)
        if sweep.spec.array_size is not None:
            submission.start_alike(runs, sweep.spec.concurrent)
        else:
            submission.start(runs[0])
        sweep.pending.clear()
        for trial in trials:
            sweep.add(trial)
            say(f"trial {trial.number} begins: {results.point_text(trial.values)}")

    def _go_on(self, following: Next) -> None:
        sweep, number = self._sweep, following.number
        values = sweep.spec.space.values(following.chosen)
        entry: TrialEntry = {
            "number": number,
            "chosen": dict(following.chosen),
            "values": values,
            "from": following.source,
            "rung": following.rung,
            "why": following.why,
        }
        run = self._run(sweep.next_folder(number).run_id, entry, following.rung)
        checkpoints = RunFolder(sweep.runs_dir / following.source).checkpoints
        self._prepared(run.job).start(dataclasses.replace(run, checkpoints=checkpoints))
        if sweep.trials[number].stopped is not None:
            # Remove the tag "stopped", which the sweep set at its end: the user has requested more trials since.
            with contextlib.suppress(OSError):
                tags_and_properties.remove_tags(sweep.folder_of(number).notes, [STOPPED])
        sweep.go_on(sweep.trials[number].gone_on(run.run_id, following, values))
        say(f"trial {number} goes on as {run.run_id}: {following.why}")

    def _start_again(self, number: int) -> None:
        sweep = self._sweep
        submit_again(sweep.folder_of(number), self._secrets)
        sweep.cut_off.remove(number)
        say(f"trial {number} begins: its submission was cut off before")

    def _prepared(self, job: Job) -> Submission:
        """Check that the target can run this job. Return the submission for all trials."""
        sweep, record = self._sweep, self._sweep.record
        if self._submission is not None:
            self._submission.check_again(job)
        else:
            source = SourceCopy(
                directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id, git=record.git
            )
            self._submission = prepare(sweep.job, source, sweep.runs_dir.parent, record.experiment)
        return self._submission

    def _run(self, run_id: str, entry: TrialEntry, rung: int, former: RunFolder | None = None) -> NewRun:
        """Return a trial's new run, resumed from `former`'s checkpoints if given."""
        sweep, spec = self._sweep, self._sweep.spec
        values = {**entry["values"], **budget(spec.stop, rung)}
        job = job_of(sweep.job, values, spec.pass_as, self._snapshot, spec.switches)
        # Put the run's id into the destinations of outputs, so that no trial overwrites the outputs of another one.
        job, secrets = unrecorded(_resumed(in_places_of(job, run_id, "{run}"), former), self._secrets)
        return NewRun(
            run_id=run_id,
            job=job,
            secrets=values_of(job, secrets),
            parent_run_id=sweep.folder.run_id,
            trial=entry,
            checkpoints=None if former is None else former.checkpoints,
        )


def _resumed(job: Job, former: RunFolder | None) -> Job:
    """Return a trial's job, with the outputs of the run `former` (if any) as `--resume-from`."""
    if former is None:
        return job
    outputs = DataReference(name=MODEL_LOCATION, sources=(Source(path=str(former.outputs)),))
    return dataclasses.replace(
        job, arguments=(*job.arguments, "--resume-from", str(outputs)), inputs=(*job.inputs, outputs)
    )


def next_run(sweep: SweepState) -> Next | None:
    """Return the next run of the paused trial that should continue now, or None."""
    policy = pausing(sweep.spec.stop)
    if policy is None:
        return None
    _look_for_checkpoints(sweep)
    without = frozenset(run_id for run_id, has in sweep.has_checkpoint.items() if not has)
    return policy.next(
        sweep.trials, sweep.spec.goal, sweep.spec.space, sweep.spec.seed, is_last=sweep.is_done, without=without
    )


def without_checkpoints(sweep: SweepState) -> str | None:
    """Return an error text if no paused trial has left a checkpoint."""
    checkpoints = sweep.has_checkpoint
    if any(checkpoints.values()) or len(checkpoints) < min(_WITHOUT, sweep.spec.trials):
        return None
    return f"{len(checkpoints)} trials have been paused, and {_NOTHING}"


def tag_waiting(sweep: SweepState) -> None:
    """Tag each paused trial with the reason why it was not continued."""
    policy = pausing(sweep.spec.stop)
    if policy is None:
        return
    trials = list(sweep.trials)
    for trial in trials:
        if not policy.waits(trial):
            continue
        why = policy.told(trial, trials, sweep.spec.goal)
        if sweep.has_checkpoint.get(trial.run_id) is False:
            why += "; it left no checkpoint"
        sweep.trials[trial.number] = dataclasses.replace(trial, stopped=why)
        if trial.stopped != why:
            with contextlib.suppress(OSError):
                tags_and_properties.set_tags(sweep.folder_of(trial.number).notes, {STOPPED: why})


_NOTHING = (
    "none has written a checkpoint to the folder PACELINE_CHECKPOINT_DIR: there is nothing to go on from. Let the script write "
    "one with each value that it logs, and load it where it finds one; or take a policy that only stops, such as asha."
)


def _look_for_checkpoints(sweep: SweepState) -> None:
    policy = pausing(sweep.spec.stop)
    for trial in sweep.trials:
        # Look for a checkpoint once per ended run, because an ended run does not change.
        if policy is None or not policy.waits(trial) or trial.run_id in sweep.has_checkpoint:
            continue
        has = any(names for _, _, names in os.walk(RunFolder(sweep.runs_dir / trial.run_id).checkpoints))
        if not has and all(sweep.has_checkpoint.values()) and not sweep.record.warnings:
            sweep.warn(
                f"trial {trial.number} has been paused, and has written no checkpoint to PACELINE_CHECKPOINT_DIR: it can't go on."
            )
        sweep.has_checkpoint[trial.run_id] = has
        sweep.changes += 1
