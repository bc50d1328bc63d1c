"""Trials that were paused: which one goes on, from whose checkpoints, and what is written down of those that never do."""

from __future__ import annotations

import contextlib
import dataclasses
import os

from paceline.controlling.canceling import STOPPED
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Next

#: Trials that were paused without a checkpoint, and none with one, that end a sweep.
_WITHOUT = 3


def following(sweep: SweepState) -> Next | None:
    """The trial that goes on next; None where none is to, now, or the sweep's policy pauses none."""
    policy = pausing(sweep.spec.stop)
    if policy is None:
        return None
    _look_for_checkpoints(sweep)
    without = frozenset(run_id for run_id, has in sweep.has_checkpoint.items() if not has)
    return policy.next(
        sweep.trials, sweep.spec.goal, sweep.spec.space, sweep.spec.seed, is_last=sweep.is_done, without=without
    )


def without_checkpoints(sweep: SweepState) -> str | None:
    """Why a sweep ends whose paused trials have left nothing to go on from."""
    found = sweep.has_checkpoint
    if any(found.values()) or len(found) < min(_WITHOUT, sweep.spec.trials):
        return None
    return f"{len(found)} trials have been paused, and {_NOTHING}"


def end(sweep: SweepState) -> None:
    """Write into the notes of each trial that still waits why it was not gone on with."""
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
        # What has ended does not change.
        if policy is None or not policy.waits(trial) or trial.run_id in sweep.has_checkpoint:
            continue
        has = _has_file(RunFolder(sweep.runs_dir / trial.run_id))
        if not has and all(sweep.has_checkpoint.values()) and not sweep.record.warnings:
            sweep.warn(
                f"trial {trial.number} has been paused, and has written no checkpoint to PACELINE_CHECKPOINT_DIR: it can't go on."
            )
        sweep.has_checkpoint[trial.run_id] = has
        sweep.changes += 1


def _has_file(folder: RunFolder) -> bool:
    return any(names for _, _, names in os.walk(folder.checkpoints))
