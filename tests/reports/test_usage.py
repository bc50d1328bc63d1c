"""The GPU and core time of runs, and the part of it that was lost."""

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
from paceline.runs.metrics import MetricLog
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


@pytest.mark.promise("core-gpu-hours-summed-up")
def test_each_lost_hour_of_a_run_is_assigned_to_one_cause(tmp_path: Path) -> None:
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


def test_usage_is_summed_by_user_and_week(tmp_path: Path) -> None:
    ended(tmp_path, 1, states.FAILED, attempt(1, 1, 2, cores=4, gpus=0), submitted_by="ann")
    ended(tmp_path, 2, states.CANCELED, attempt(1, 1, 2, cores=4, gpus=0), submitted_by="bob")
    # Earlier versions did not record cores, so each worker counts as one core.
    ended(tmp_path, 3, states.COMPLETED, attempt(1, 1, 9), submitted_by="bob", job=make_job())
    # This run was created one day earlier, which is in another week.
    ended(tmp_path, 4, states.COMPLETED, attempt(1, 1, 2, cores=1, gpus=1), submitted_by="bob", created_utc=at(-1))
    runs_dir = tmp_path / "runs"
    by_user = {one.name: one for one in summed(runs_dir, "user")}
    assert (by_user["ann"].core_hours, by_user["ann"].failed_core_hours) == (4, 4)
    assert (by_user["bob"].runs, by_user["bob"].core_hours, by_user["bob"].canceled_core_hours) == (3, 13, 4)
    assert [(one.name, one.runs) for one in summed(runs_dir, "week")] == [("2026-W48", 3), ("2026-W47", 1)]
    # The user with more GPU hours comes first.
    assert [one.name for one in summed(runs_dir, "user")] == ["bob", "ann"]
    assert [
        (one.name, one.runs)
        for one in summed(runs_dir, "target", since=dt.datetime.fromisoformat(at(0).replace("Z", "+00:00")))
    ] == [("lab", 3)]


@pytest.mark.promise("core-gpu-hours-summed-up")
def test_usage_report_counts_gpu_hours_lost_to_idling_and_to_waiting_for_data(tmp_path: Path) -> None:
    folder = ended(
        tmp_path, 1, states.COMPLETED, attempt(1, 1, 2, "node_lost", cores=8, gpus=2), attempt(2, 2, 4, cores=8, gpus=2)
    )
    lines = [{"time_utc": at(hour), "status": status} for status, hour in (("Preparing", 0), ("Starting", 1))]
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Node 0 has fetched two inputs for half an hour. Node 1 was ready earlier, but has waited as long.
    inputs = [{"node_rank": 0, "fetch_s": 600}, {"node_rank": 0, "fetch_s": 1200}, {"node_rank": 1, "fetch_s": 60}, {}]
    folder.data.write_text(json.dumps({"inputs": inputs}))
    log = MetricLog(folder.node_log(0))
    begin = dt.datetime.fromisoformat(at(0).replace("Z", "+00:00")).timestamp()
    # (hour, percent of GPU 0, percent of GPU 1). The samples are closer together at the beginning of the attempt.
    for hour, first, second in ((1.5, 0, 0), (2.1, 100, 50), (2.2, 100, 50), (2.5, 100, 50), (3.0, 0, 50), (9.0, 0, 0)):
        for name, busy in (
            ("gpu0_percent", first),
            ("gpu1_percent", second),
            ("cpu_percent", 3),
            ("gpu0_memory_gib", 70),
        ):
            log.scalar(name, float(busy), int(begin + hour * 3600))
    log.close()
    found = of_run(folder, read.record(folder))
    assert found.idle_gpu_hours == pytest.approx(2 * 0.5 + 2 * 0.5)
    assert (found.data_gpu_hours, found.preparing_gpu_hours) == pytest.approx((0.5 * 2, 0.5 * 2))
    assert found.lost_gpu_hours == pytest.approx(2 + 2 + 2)
    assert found.lost_core_hours == pytest.approx((1 + 1) * 8)
    # The run held fewer GPUs than the node has, and its record does not say which GPUs.
    one = ended(tmp_path, 2, states.COMPLETED, attempt(1, 1, 4, cores=8, gpus=1))
    one.metrics.mkdir(parents=True, exist_ok=True)
    one.node_log(0).write_bytes(folder.node_log(0).read_bytes())
    assert of_run(one, read.record(one)).idle_gpu_hours == 0
