"""What runs have held, and what was lost of it."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.reports.usage import of_run, summed
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt
from tests.helpers import make_job, make_run


def at(hour: float) -> str:
    return (
        (dt.datetime(2026, 11, 23, tzinfo=dt.timezone.utc) + dt.timedelta(hours=hour))
        .isoformat()
        .replace("+00:00", "Z")
    )


def attempt(number: int, start: float, end: float, cause: str | None = None, **held: Any) -> Attempt:
    return Attempt(number=number, started_utc=at(start), ended_utc=at(end), cause=cause, **held)


def ended(tmp_path: Path, number: int, status: str, *attempts: Attempt, **given: Any) -> RunFolder:
    record = {"ended_utc": at(9), "created_utc": at(0), "attempts": attempts, "target": "lab"}
    folder, fd = make_run(tmp_path / "runs", f"fit_170000000{number}_0123abcd", status, **(record | given))
    os.close(fd)
    return folder


def test_no_hour_counts_twice_and_each_that_is_lost_has_its_cause(tmp_path: Path) -> None:
    folder = ended(
        tmp_path,
        1,
        states.COMPLETED,
        attempt(1, 1, 3, "node_lost", cores=8, gpus=2),
        attempt(2, 3, 7, cores=8, gpus=2),
    )
    events = [
        ("Queued", 0),
        ("Preparing", 0.5),
        ("Starting", 1),
        ("Running", 1.1),
        ("Finalizing", 7),
        ("Completed", 7.1),
    ]
    lines = [json.dumps({"time_utc": at(hour), "status": status}) for status, hour in events]
    folder.events.write_text("\n".join(lines) + '\n{"time_u')
    found = of_run(folder, read.record(folder))
    assert found.core_hours == pytest.approx((0.5 + 6) * 8)
    assert found.gpu_hours == pytest.approx((0.5 + 6) * 2)
    assert found.failed_gpu_hours == pytest.approx(2 * 2)
    assert found.preparing_core_hours == pytest.approx(0.5 * 8)
    assert found.lost_core_hours == pytest.approx((2 + 0.5) * 8)


def test_they_are_summed_by_user_and_week(tmp_path: Path) -> None:
    ended(tmp_path, 1, states.FAILED, attempt(1, 1, 2, cores=4, gpus=0), submitted_by="ann")
    ended(tmp_path, 2, states.CANCELED, attempt(1, 1, 2, cores=4, gpus=0), submitted_by="bob")
    # An attempt of an earlier version: a core a worker.
    ended(tmp_path, 3, states.COMPLETED, attempt(1, 1, 9), submitted_by="bob", job=make_job())
    # On its last day, another week.
    ended(tmp_path, 4, states.COMPLETED, attempt(1, 1, 2, cores=1, gpus=1), submitted_by="bob", created_utc=at(-1))
    runs_dir = tmp_path / "runs"
    by_user = {one.name: one for one in summed(runs_dir, "user")}
    assert (by_user["ann"].core_hours, by_user["ann"].failed_core_hours) == (4, 4)
    assert (by_user["bob"].runs, by_user["bob"].core_hours, by_user["bob"].canceled_core_hours) == (3, 13, 4)
    assert [(one.name, one.runs) for one in summed(runs_dir, "week")] == [("2026-W48", 3), ("2026-W47", 1)]
    # GPUs come first.
    assert [one.name for one in summed(runs_dir, "user")] == ["bob", "ann"]
    assert [
        (one.name, one.runs)
        for one in summed(runs_dir, "target", since=dt.datetime.fromisoformat(at(0).replace("Z", "+00:00")))
    ] == [("lab", 3)]
