"""Divide the core- and GPU-seconds of a run into classes that do not overlap (docs/when-it-is-slow.md#what-a-run-cost).

    queue | preparing | starting | training, from samples             | starting | repeated | training | preparing
                        attempt 1                       (hanging)       attempt 2

The times of states, attempts, hangs and samples come from the supervisor's clock, so the clocks of nodes do not matter.
The times of metrics come from their worker's clock. This module uses only differences between such times, to measure
the steps that a restart repeats.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.observe.load_watch import SECONDS, merged_samples
from paceline.runs import states
from paceline.runs.folder import RunFolder, load_logs, metric_logs, node_logs
from paceline.runs.metric_reader import parsed_lines
from paceline.runs.record import Attempt, RunRecord, seconds_of
from paceline.system.files import json_lines, read_json

QUEUE, PREPARING, STARTING, COMPUTING, COMMUNICATING = "queue", "preparing", "starting", "computing", "communicating"
DATA, EVALUATING, CHECKPOINTING = "waiting for data", "evaluating", "checkpointing"
AGAIN, HANGING, IDLE, UNKNOWN = "done again", "hanging", "idle", "unknown"
#: All classes of a run's time, in the order in which a run usually has them.
CLASSES = (
    *(QUEUE, PREPARING, STARTING, COMPUTING, COMMUNICATING, DATA),
    *(EVALUATING, CHECKPOINTING, AGAIN, HANGING, IDLE, UNKNOWN),
)
#: Classes of time in which the training advanced. The effective training time ratio (ETTR) counts these classes.
EFFECTIVE = (COMPUTING, COMMUNICATING, DATA, EVALUATING)
#: Assumed watts of a core and of a GPU that a run holds, for nodes without a power meter.
CORE_WATTS, GPU_WATTS = 10.0, 300.0

#: Name of a sampled percentage -> the class of time that it measures.
_MEASURED = {
    "rank_wait_percent": COMMUNICATING,
    "rank_data_percent": DATA,
    "rank_eval_percent": EVALUATING,
    "rank_save_percent": CHECKPOINTING,
}
_OF_STATE = {
    **dict.fromkeys((states.NOT_STARTED, states.QUEUED), QUEUE),
    **dict.fromkeys((states.PREPARING, states.FINALIZING), PREPARING),
    **dict.fromkeys((states.STARTING, states.RUNNING), STARTING),
}
#: If more than this many times the usual time has passed between two samples, its use counts as unknown.
_GAP = 3.0
#: If a step seems to take more than this many times the median, the worker's clock has jumped.
_JUMP = 50.0

Shares = Mapping[str, float]
Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The core- and GPU-seconds of a run, by activity.

    Attributes:
        run_id: The run's id.
        seconds: Seconds from the submission to the end, or to now if the run has not ended.
        core_s: Core-seconds by class of use, such as {"computing": 120.0}; the classes are `CLASSES`.
        gpu_s: GPU-seconds by class; all 0 without GPUs.
        energy_kwh: Energy in kWh while the run held its nodes.
        energy_source: How the energy was measured or estimated, such as "measured by RAPL".
        price: Price of the core-hours and GPU-hours, or None if the target has no price.
    """

    run_id: str
    seconds: float
    core_s: Mapping[str, float]
    gpu_s: Mapping[str, float]
    energy_kwh: float
    energy_source: str
    price: float | None = None

    @property
    def percent(self) -> dict[str, float]:
        """Percentage of the GPU-seconds by class, or of the core-seconds without GPUs."""
        used = self.gpu_s if sum(self.gpu_s.values()) > 0 else self.core_s
        total = sum(used.values())
        return {name: 100 * used[name] / total if total > 0 else 100.0 * (name == UNKNOWN) for name in CLASSES}

    @property
    def ettr(self) -> float:
        """The effective training time ratio: the fraction of time in which training advanced."""
        return sum(self.percent[name] for name in EFFECTIVE) / 100

    @property
    def summary(self) -> str:
        """A line with the ETTR, the energy and the price."""
        price = "" if self.price is None else f", price {self.price:.2f}"
        source = f" ({self.energy_source})" if self.energy_source else ""
        return f"ETTR {100 * self.ettr:.1f} %, energy {self.energy_kwh:.3g} kWh{source}{price}"

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            **{"run_id": self.run_id, "seconds": self.seconds, "ettr": self.ettr, "percent": self.percent},
            **{"core_s": dict(self.core_s), "gpu_s": dict(self.gpu_s)},
            **{"energy_kwh": self.energy_kwh, "energy_source": self.energy_source, "price": self.price},
        }


class Interval(NamedTuple):
    """A rank's period, divided into classes such as computing and waiting."""

    start: float
    end: float
    cores: Shares
    gpus: Shares


class _Sample(NamedTuple):
    at: float
    values: Mapping[str, float]


@dataclass
class _Sums:
    cores: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    gpus: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))

    def add(self, seconds: float, cores: float, gpus: float, of_cores: Shares, of_gpus: Shares) -> None:
        for name, share in of_cores.items():
            self.cores[name] += seconds * cores * share
        for name, share in of_gpus.items():
            self.gpus[name] += seconds * gpus * share

    @property
    def held(self) -> tuple[float, float]:
        """The core-seconds and GPU-seconds in which the run was not queued."""
        return sum(self.cores.values()) - self.cores[QUEUE], sum(self.gpus.values()) - self.gpus[QUEUE]


def goodput(folder: RunFolder, record: RunRecord) -> Goodput:
    """Return a run's core- and GPU-seconds, by activity.

    Times for which the run's files are damaged count as unknown.
    """
    marks = _states(folder, record)
    start = marks[0][0]
    end = max(start, seconds_of(record.ended_utc) or (marks[-1][0] if record.is_terminal else time.time()))
    ranks = {number: _samples(parsed_lines(path)) for number, path in load_logs(folder.metrics).items()}
    redone = _redone(folder)
    sums = _Sums()
    now = start
    held = _held(record, None)
    for attempt, (begin, until) in _attempts(record, start, end):
        held = _held(record, attempt)
        _add_states(sums, marks, (now, begin), held)
        running = min((at for at, status in marks if at >= begin and status == states.RUNNING), default=until)
        number = _count(attempt.number) or 0
        size = _count(attempt.world_size) or record.world_size
        within = ((rank, _within(samples, begin, until)) for rank, samples in ranks.items())
        present = {rank: samples for rank, samples in within if samples}
        running = min([running, until, *(max(samples[0].at, begin) for samples in present.values())])
        span = _Attempt(folder, number, (begin, until), running, redone.get(number, 0.0))
        count = max(size, len(present), 1)
        last = max((samples[-1].at for samples in present.values()), default=begin)
        cores, gpus = held[0] / count, held[1] / count
        # All ranks without samples have equal intervals, so compute these intervals only once.
        without: list[_Sample] = []
        for samples, alike in [*((found, 1) for found in present.values()), (without, count - len(present))]:
            for one in span.intervals(samples, last, cores):
                sums.add(one.end - one.start, alike * cores, alike * gpus, one.cores, one.gpus)
        now = until
    _add_states(sums, marks, (now, end), held)
    energy_kwh, source = _energy(folder, sums, (start, end))
    return Goodput(
        run_id=record.run_id,
        seconds=end - start,
        core_s=sums.cores,
        gpu_s=sums.gpus,
        energy_kwh=energy_kwh,
        energy_source=source,
        price=_price(folder, sums),
    )


class _Attempt:
    """A division of an attempt's time into classes such as computing."""

    def __init__(self, folder: RunFolder, number: int, span: Span, running: float, redone_s: float) -> None:
        self._begin, self._end = span
        self._running, self._redone_s = running, redone_s
        self._hangs = list(_hangs(folder, number, span))
        every_s = _object(folder.load(number)).get("every_s")
        self._every_s = max(_number(every_s) or SECONDS, 1.0)

    def intervals(self, samples: Sequence[_Sample], last: float, cores: float) -> Iterator[Interval]:
        """Yield intervals that cover the whole attempt of one rank.

        last: Time of the last sample of any rank. cores: Number of cores of one rank.
        """
        steps = [number for number, one in enumerate(samples) if one.values.get("rank_steps_s", 0.0) > 0]
        first = steps[0] if steps else None
        found = [_all(self._begin, self._running, STARTING)]
        at = self._running
        for number, one in enumerate(samples):
            if one.at <= at:
                continue
            usual = self._usual(one.at)
            if number and one.at - at > _GAP * usual:
                found.append(_all(at, one.at - usual, UNKNOWN))
                at = one.at - usual
            if first is not None and number < first:
                found.append(_all(at, one.at, STARTING))
            elif not number:
                found.append(_all(at, one.at, STARTING if first == 0 else UNKNOWN))
            else:
                found.append(_classified(at, one, cores, trains=bool(steps)))
            at = one.at
        # If other ranks have many later samples, this rank's process ended earlier.
        is_over = samples and last - samples[-1].at > _GAP * self._usual(last)
        found.append(_all(at, self._end, IDLE if is_over else UNKNOWN))
        train = samples[first - 1].at if first else samples[0].at if samples else self._running
        return self._overlaid((one for one in found if one.end > one.start), (train, train + self._redone_s))

    def _overlaid(self, intervals: Iterable[Interval], again: Span) -> Iterator[Interval]:
        cuts = sorted({edge for span in (*self._hangs, again) for edge in span if math.isfinite(edge)})
        for one in intervals:
            edges = [one.start, *cuts[bisect.bisect(cuts, one.start) : bisect.bisect_left(cuts, one.end)], one.end]
            for start, end in itertools.pairwise(edges):
                middle = (start + end) / 2
                if any(since < middle < until for since, until in self._hangs):
                    yield _all(start, end, HANGING)
                elif again[0] < middle < again[1]:
                    yield _all(start, end, AGAIN)
                else:
                    yield one._replace(start=start, end=end)

    def _usual(self, at: float) -> float:
        return self._every_s * merged_samples(at - self._begin)


def _all(start: float, end: float, name: str) -> Interval:
    return Interval(start, end, {name: 1.0}, {name: 1.0})


def _classified(start: float, sample: _Sample, cores: float, *, trains: bool) -> Interval:
    values = sample.values
    if not {"rank_memory_gib", "rank_cpu_percent"} & values.keys():  # a process without these values has ended
        return _all(start, sample.at, IDLE)
    shares = {name: _share(values[key]) for key, name in _MEASURED.items() if key in values}
    total = sum(shares.values())
    shares = {name: share / max(1.0, total) for name, share in shares.items()}
    rest = max(0.0, 1 - total)
    cpu, gpu = values.get("rank_cpu_percent"), values.get("rank_gpu_percent")
    # If a rank counts steps, assume that it uses its cores while its main thread doesn't wait. Otherwise use its CPU time.
    used = rest if trains else None if cpu is None else _share(cpu / max(cores, 1e-9))
    kernels = rest if gpu is None and trains else None if gpu is None else _share(gpu)
    return Interval(start, sample.at, _divided(shares, rest, used), _divided(shares, rest, kernels))


def _divided(shares: Shares, rest: float, used: float | None) -> Shares:
    if used is None:
        return {**shares, UNKNOWN: rest}
    return {**shares, COMPUTING: min(rest, used), IDLE: rest - min(rest, used)}


def _add_states(sums: _Sums, marks: Sequence[tuple[float, str]], span: Span, held: tuple[float, float]) -> None:
    for number, (at, status) in enumerate(marks):
        until = marks[number + 1][0] if number + 1 < len(marks) else math.inf
        seconds = min(until, span[1]) - max(at, span[0])
        if seconds > 0:
            shares = {_OF_STATE.get(status, UNKNOWN): 1.0}
            sums.add(seconds, *held, shares, shares)


def _states(folder: RunFolder, record: RunRecord) -> list[tuple[float, str]]:
    told = [(seconds_of(record.created_utc), states.NOT_STARTED)]
    lines = [
        line for line in json_lines(folder.events) if isinstance(line, dict) and isinstance(line.get("status"), str)
    ]
    told += [(seconds_of(line.get("time_utc")), line["status"]) for line in lines]
    found = [(at, status) for at, status in told if at is not None]
    start = min((seconds_of(one.started_utc) or math.inf for one in record.attempts), default=math.inf)
    if not found:
        return [(start if math.isfinite(start) else time.time(), "")]
    # Times must not decrease, even if the clock was set back.
    times = itertools.accumulate((at for at, _ in found), max)
    # A program that tracks its own run has no attempts, so its use of time is unknown: use "" as its status.
    return [
        (at, status if record.attempts or status != states.RUNNING else "")
        for at, (_, status) in zip(times, found, strict=True)
    ]


def _attempts(record: RunRecord, start: float, end: float) -> Iterator[tuple[Attempt, Span]]:
    now = start
    for number, attempt in enumerate(record.attempts):
        begin = seconds_of(attempt.started_utc)
        if begin is None:
            continue
        later = (seconds_of(one.started_utc) for one in record.attempts[number + 1 :])
        latest = min([end, *(at for at in later if at is not None and at >= begin)])
        until = seconds_of(attempt.ended_utc)
        begin = min(max(begin, now), end)
        now = max(begin, min(latest if until is None else until, latest))
        yield attempt, (begin, now)


def _held(record: RunRecord, attempt: Attempt | None) -> tuple[float, float]:
    """Return how many cores and GPUs an attempt has. None: the first attempt."""
    first = attempt or next(iter(record.attempts), None)
    size = max(record.world_size, 1)
    cores = _count(first.cores) if first else None
    gpus = _count(first.gpus) if first else None
    wanted = size if record.job is not None and record.job.use_gpu else 0
    return float(cores or size), float(wanted if gpus is None else gpus)


def _hangs(folder: RunFolder, number: int, span: Span) -> Iterator[Span]:
    since: float | None = None
    for line in json_lines(folder.hangs(number)):
        told = line if isinstance(line, dict) else {}
        since = since or seconds_of(told.get("since_utc"))
        until = seconds_of(told.get("until_utc"))
        if since is not None and until is not None:
            yield max(since, span[0]), min(until, span[1])
            since = None
    if since is not None:
        yield max(since, span[0]), span[1]


def _redone(folder: RunFolder) -> dict[int, float]:
    """Return {attempt: seconds spent on steps that an earlier attempt had already done}."""
    logs = metric_logs(folder.metrics)
    attempts = next((found for found in logs.values() if len(found) > 1), {})
    reached: dict[str, int] = {}
    found = {}
    for number, path in attempts.items():
        newly, stamps = dict(reached), dict[int, float]()
        for line in parsed_lines(path):
            match line:
                case {"name": str(name), "step": int(step), "time": int() | float() as at} if _number(at) is not None:
                    if step <= reached.get(name, -1):
                        stamps.setdefault(step, float(at))
                    newly[name] = max(step, newly.get(name, step))
        reached = newly
        times = list(stamps.values())
        steps = [after - before for before, after in itertools.pairwise(times)]
        usual = statistics.median(steps) if steps else 0.0
        whole = [step if 0 <= step <= _JUMP * usual else max(usual, 0.0) for step in steps]
        # The duration of the first step is unknown, because it began before the first stamp. Assume the mean.
        found[number] = sum(whole) * len(times) / max(len(whole), 1)
    return found


def _samples(lines: Iterable[object]) -> list[_Sample]:
    found: list[_Sample] = []
    values: dict[str, float] = {}
    for line in lines:
        if not isinstance(line, dict):
            continue
        name, value, at = line.get("name"), _number(line.get("value")), _number(line.get("step"))
        if not isinstance(name, str) or value is None or at is None:
            continue
        if not found or at > found[-1].at:
            values = {}
            found.append(_Sample(at, values))
        # Skip samples with earlier times, which occur after the supervisor's clock was set back.
        if at == found[-1].at:
            values[name] = value
    return found


def _within(samples: Sequence[_Sample], begin: float, until: float) -> list[_Sample]:
    # Samples have whole seconds, rounded down, so accept a sample that seems up to one second early.
    return [one for one in samples if begin - 1 < one.at <= until]


def _energy(folder: RunFolder, sums: _Sums, span: Span) -> tuple[float, str]:
    joules = {"cpu": 0.0, "gpu": 0.0}
    for path in node_logs(folder.metrics).values():
        before: float | None = None
        for at, values in _within(_samples(parsed_lines(path)), *span):
            passed, before = at - before if before is not None else 0.0, at
            for name, value in values.items():
                if name.endswith("_watts"):
                    joules["cpu" if name == "cpu_watts" else "gpu"] += max(0.0, value) * passed
    sources = []
    total = 0.0
    for kind, meter, held, watts in zip(joules, ("RAPL", "NVML"), sums.held, (CORE_WATTS, GPU_WATTS), strict=True):
        total += joules[kind] or watts * held
        if held:
            title = {"cpu": "core", "gpu": "GPU"}[kind]
            sources.append(f"measured by {meter}" if joules[kind] else f"model: {watts:g} W for each {title} held")
    return total / 3.6e6, "; ".join(sources)


def _price(folder: RunFolder, sums: _Sums) -> float | None:
    settings = _object(folder.target).get("settings")
    rates = [_number(settings.get(key)) for key in ("core_price", "gpu_price")] if isinstance(settings, dict) else []
    if not any(rate is not None for rate in rates):
        return None
    return sum(max(0.0, rate or 0.0) * held / 3600 for rate, held in zip(rates, sums.held, strict=True))


def _object(path: Path) -> Mapping[str, object]:
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    try:
        found = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return found if abs(found) < 1e15 else None


def _count(value: object) -> int | None:
    found = _number(value)
    return None if found is None or found < 0 else int(min(found, 1e9))


def _share(percent: float) -> float:
    return min(max(percent, 0.0), 100.0) / 100
