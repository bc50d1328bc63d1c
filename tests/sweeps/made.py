"""Sweeps on disk with children in any state, without a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial_runs import child_id
from tests.helpers import make_record

SWEEP_ID = "tuned_1700000000_00000001"


def make_sweep(runs_dir: Path, spec: SweepSpec, status: str = states.COMPLETED, **values: Any) -> RunFolder:
    """The folder of a sweep in this state. While it goes on, this process looks after it."""
    return _made(runs_dir, make_record(SWEEP_ID, kind="sweep", sweep=spec.to_json(), **values), status)


def add_trial(
    sweep: RunFolder,
    number: int,
    values: dict[str, Any],
    curve: tuple[float, ...] = (),
    status: str = states.COMPLETED,
    *,
    chosen: dict[str, Any] | None = None,
    metric: str = "loss",
    leg: int = 1,
    first_step: int | None = None,
    told: dict[str, Any] | None = None,
    **changes: Any,
) -> RunFolder:
    """A child of the sweep in this state, which has logged this curve.

    leg: which run of its trial. first_step: of the curve; None for values without steps. told: more of the record's trial.
    """
    record = make_record(
        child_id(sweep.run_id, number, leg),
        parent_run_id=sweep.run_id,
        trial={"number": number, "chosen": chosen or {}, "values": values, **(told or {})},
        started_utc="2026-01-01T00:00:00.000Z",
    )
    folder = _made(sweep.path.parent, record, status, ended_utc="2026-01-01T00:00:05.000Z", **changes)
    log_values(folder, metric, curve, first_step)
    return folder


def log_values(
    folder: RunFolder, metric: str, values: tuple[float, ...], first_step: int | None = None, rank: int = 0
) -> None:
    """Add values to what a rank of the run has logged."""
    with folder.metric_log(rank).open("a") as log:
        for number, value in enumerate(values):
            step = None if first_step is None else first_step + number
            log.write(json.dumps({"name": metric, "value": value, "time": 0.0, "step": step}) + "\n")


#: Descriptors of the locks of running sweeps and trials. This process holds the locks until it ends.
_HELD: list[int] = []


def _made(runs_dir: Path, record: RunRecord, status: str, **changes: Any) -> RunFolder:
    fd = store.create(runs_dir, record)
    folder = RunFolder(runs_dir / record.run_id)
    if status in states.TERMINAL:
        store.change(folder, record, status, **changes)
        os.close(fd)
    else:
        _HELD.append(fd)
        if status != record.status:
            store.change(folder, record, status)
    return folder
