"""The trials of a sweep, read from its children: they are its storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.errors import RunNotFoundError
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.sweeps.curves import CurveReader
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial


def child_id(sweep_id: str, number: int) -> str:
    """The run id of a trial, as the Azure SDK numbers them: `<sweep>_<number from 0>`."""
    return f"{sweep_id}_{number}"


def children(sweep: RunFolder, first: int = 0) -> Iterator[RunRecord]:
    """The records of the sweep's children, in order of their numbers from `first` on, as they are now."""
    runs_dir = sweep.path.parent
    # Numbers are given out in order, one after the other: the first that is not there is the end.
    number = first
    while True:
        folder = RunFolder(runs_dir / child_id(sweep.run_id, number))
        if not folder.record.exists():
            return
        try:
            yield read.record(folder)
        except RunNotFoundError:
            # It was removed between the two looks.
            return
        number += 1


def trial_of(record: RunRecord, runs_dir: Path, spec: SweepSpec) -> Trial:
    """What samplers and policies are told of a child."""
    told = record.trial or {}
    return Trial(
        number=int(told.get("number", -1)),
        run_id=record.run_id,
        chosen=told.get("chosen") or {},
        values=told.get("values") or {},
        status=record.status,
        curve=CurveReader(RunFolder(runs_dir / record.run_id).metrics, spec.metric).look(),
        started_utc=record.started_utc,
        ended_utc=record.ended_utc,
    )


def trials(sweep: RunFolder, spec: SweepSpec) -> list[Trial]:
    """All trials of the sweep, in order of their numbers."""
    return [trial_of(record, sweep.path.parent, spec) for record in children(sweep)]
