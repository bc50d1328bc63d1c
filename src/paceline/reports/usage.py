"""Sum the core hours and GPU hours that runs held, and the lost hours among them.

A run holds its cores and GPUs from the start of its nodes to the end of its last attempt, busy or not. Core hours are
cores times hours, not CPU time. Hours without useful work count as lost. Each lost hour counts once, under one cause:

    Preparing              attempt 1, failed          attempt 2, completed
    |-- packages -- data --|------- failed -----------|------- useful ------|
                                                      |- idle -| (GPU hours)
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.runs import read, states
from paceline.runs.folder import RunFolder, node_logs
from paceline.runs.record import Attempt, RunRecord, duration_s, parse_utc
from paceline.runs.run_data import read_data
from paceline.system.files import json_lines

#: Name of a key by which usage is summed -> function that returns a run's value of it.
KEYS: dict[str, Callable[[RunRecord], str]] = {
    "user": lambda record: record.submitted_by or "unknown",
    "experiment": lambda record: record.experiment,
    "target": lambda record: record.target or "none",
    "week": lambda record: _week(record.created_utc),
}

_BUSY = re.compile(r"gpu\d+_percent")

#: (node, name) of each GPU -> its samples in order of time: (seconds since 1970, percent of time with a running kernel).
Looks = Mapping[tuple[int, str], list[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The core hours and GPU hours that runs have held.

    Attributes:
        failed_*: Hours in attempts that failed or were interrupted, even if the run completed later.
        canceled_*: Hours in canceled attempts.
        preparing_*: Hours in which nodes waited for the installation of packages.
        data_*: Hours in which nodes waited for input data.
        idle_gpu_hours: GPU hours without a running kernel, in attempts that are neither failed nor canceled.
    """

    name: str
    runs: int = 0
    core_hours: float = 0.0
    gpu_hours: float = 0.0
    failed_core_hours: float = 0.0
    failed_gpu_hours: float = 0.0
    canceled_core_hours: float = 0.0
    canceled_gpu_hours: float = 0.0
    preparing_core_hours: float = 0.0
    preparing_gpu_hours: float = 0.0
    data_core_hours: float = 0.0
    data_gpu_hours: float = 0.0
    idle_gpu_hours: float = 0.0

    @property
    def lost_core_hours(self) -> float:
        return self.failed_core_hours + self.canceled_core_hours + self.preparing_core_hours + self.data_core_hours

    @property
    def lost_gpu_hours(self) -> float:
        waited = self.preparing_gpu_hours + self.data_gpu_hours + self.idle_gpu_hours
        return self.failed_gpu_hours + self.canceled_gpu_hours + waited

    def to_json(self) -> dict[str, object]:
        """Return all fields, and the sums of lost hours (without useful work)."""
        lost = {"lost_core_hours": self.lost_core_hours, "lost_gpu_hours": self.lost_gpu_hours}
        return {**asdict(self), **lost}

    def plus(self, other: Usage) -> Usage:
        """Return the sum of two usages, under the name of this usage."""
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__ if name != "name"
        }
        return replace(self, **sums)


def summed(runs_dir: Path, by: str, *, since: dt.datetime | None = None) -> list[Usage]:
    """Return the usage of runs, summed by "user", "experiment", "target" or "week".

    since: Count only runs submitted at this time or later; None for all. Trials of sweeps count as runs, sweeps do not.
    """
    usage_by_key: dict[str, Usage] = {}
    for record in read.all_records(runs_dir):
        if since is not None and parse_utc(record.created_utc) < since:
            continue
        # Skip interactive runs, whose resources are unknown. Skip sweeps too, because each of their trials is a run itself.
        if record.job is None or record.sweep is not None:
            continue
        name = KEYS[by](record)
        usage_by_key[name] = usage_by_key.get(name, Usage(name=name)).plus(
            of_run(RunFolder(runs_dir / record.run_id), record)
        )
    if by == "week":
        return sorted(usage_by_key.values(), key=lambda one: one.name, reverse=True)
    return sorted(usage_by_key.values(), key=lambda one: (-one.gpu_hours, -one.core_hours, one.name))


def of_run(folder: RunFolder, record: RunRecord) -> Usage:
    """Return the usage of one run, up to now."""
    sums: dict[str, float] = defaultdict(float)
    size = record.job.world_size if record.job else 1

    def gpus_of(attempt: Attempt) -> int:
        return attempt.gpus if attempt.gpus is not None else (size if record.job and record.job.use_gpu else 0)

    def add(hours: float, attempt: Attempt, lost: str | None) -> None:
        # An attempt of an old version does not record how many cores it held. Count one core per process, which is a lower bound.
        cores = attempt.cores if attempt.cores is not None else size
        for kind, count in (("core", cores), ("gpu", gpus_of(attempt))):
            sums[f"{kind}_hours"] += hours * count
            if lost is not None:
                sums[f"{lost}_{kind}_hours"] += hours * count

    looks = gpu_looks(folder) if any(map(gpus_of, record.attempts)) else {}
    for attempt in record.attempts:
        # If an attempt has no recorded end, it has ended when its run ended, or earlier.
        took_s = duration_s(attempt.started_utc, attempt.ended_utc or record.ended_utc) or 0.0
        lost = _lost(record, attempt)
        add(took_s / 3600, attempt, lost)
        if lost is None:
            began_s = parse_utc(attempt.started_utc).timestamp()
            sums["idle_gpu_hours"] += idle_hours(looks, began_s, began_s + took_s, gpus_of(attempt))
    if record.attempts:
        preparing_s = _preparing_s(folder)
        data_s = min(preparing_s, _fetching_s(folder))
        add((preparing_s - data_s) / 3600, record.attempts[0], "preparing")
        add(data_s / 3600, record.attempts[0], "data")
    return Usage(name=record.run_id, runs=1, **sums)


def _lost(record: RunRecord, attempt: Attempt) -> str | None:
    is_last = attempt is record.attempts[-1]
    if attempt.cause == "cancel" or (is_last and record.status == states.CANCELED):
        return "canceled"
    if attempt.cause is not None or (is_last and record.status == states.FAILED):
        return "failed"
    return None


def _preparing_s(folder: RunFolder) -> float:
    """Return the seconds in which a run prepared its nodes."""
    total, since = 0.0, None
    for time, status in _events(folder):
        if since is not None:
            total += max(0.0, (time - since).total_seconds())
        since = time if status == states.PREPARING else None
    return total


def _fetching_s(folder: RunFolder) -> float:
    """Return the seconds that the slowest node took to fetch the inputs."""
    by_node: dict[int | None, float] = defaultdict(float)
    for data in read_data(folder)["inputs"]:
        by_node[data.get("node_rank")] += data.get("fetch_s", 0.0)
    return max(by_node.values(), default=0.0)


def _events(folder: RunFolder) -> Iterator[tuple[dt.datetime, str]]:
    try:
        lines = folder.events.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
            yield parse_utc(event["time_utc"]), event["status"]
        # Skip a last line that is incomplete because the supervisor was killed.
        except (ValueError, KeyError, TypeError):
            continue


def _week(created_utc: str) -> str:
    year, week, _ = parse_utc(created_utc).isocalendar()
    return f"{year}-W{week:02d}"


def gpu_looks(folder: RunFolder) -> Looks:
    """Return (node, GPU) -> (time, percent busy) samples of a run's GPUs."""
    samples: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for node, path in node_logs(folder.metrics).items():
        for line in json_lines(path):
            match line:
                case {"name": str(name), "value": int() | float() as busy, "step": int(at)} if _BUSY.fullmatch(name):
                    samples.setdefault((node, name), []).append((float(at), float(busy)))
    return samples


def idle_hours(looks: Looks, start_s: float, end_s: float, held: int) -> float:
    """Return the GPU hours without a running kernel between two times, from samples.

    held: The number of GPUs that the run held. If more GPUs have samples, the result is 0, because it is unknown which
        of them the run held. Without samples, the result is 0 too.
    """
    hours = 0.0
    within = {gpu: [sample for sample in seen if start_s <= sample[0] <= end_s] for gpu, seen in looks.items()}
    measured = [seen for seen in within.values() if seen]
    if len(measured) > held:
        return 0.0
    for seen in measured:
        before, idle, total = start_s, 0.0, 0.0
        for at, busy in seen:
            idle += (at - before) * (1 - min(max(busy, 0.0), 100.0) / 100)
            total += at - before
            before = at
        hours += (idle / total if total > 0 else 0.0) * (end_s - start_s) / 3600
    return hours
