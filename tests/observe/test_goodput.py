"""Classes of a run's time: simulated runs with a known truth, broken records, and a real run with a kill."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.observe.goodput import CLASSES, Goodput, goodput
from paceline.observe.load_watch import THINNED
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, utc_text
from tests.helpers import make_job, make_run

BASE = 1_790_000_000
NAMES = {"communicating": "wait", "waiting for data": "data", "evaluating": "eval", "checkpointing": "save"}


def at(second: float) -> str:
    import datetime as dt

    return utc_text(dt.datetime.fromtimestamp(BASE + second, dt.timezone.utc))


def write_lines(path: Path, lines: list[Any], *, torn: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(f'{text[: len(text) // 2]}\n{{"na\n{text[len(text) // 2 :]}' if torn else text)


@dataclass
class Simulated:
    """A run that is simulated second by second, its records, and the truth."""

    seed: int
    now: int = 0
    truth: Counter[str] = field(default_factory=Counter)
    gpu_truth: Counter[str] = field(default_factory=Counter)
    attempts: list[Attempt] = field(default_factory=list)
    events: list[dict[str, str]] = field(default_factory=list)
    loads: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    reached: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.ranks = self.rng.choice([1, 2, 3, 4, 6])
        self.cores = self.ranks * self.rng.choice([1, 4])
        self.gpus = self.ranks * self.rng.choice([0, 1])

    def state(self, status: str, name: str, seconds: int) -> None:
        self.events.append({"time_utc": at(self.now), "status": status})
        self.truth[name] += seconds * self.cores
        self.gpu_truth[name] += seconds * self.gpus
        self.now += seconds

    def attempt(self, folder: RunFolder, *, is_last: bool) -> None:
        number, rng, begin = len(self.attempts) + 1, self.rng, self.now
        start, length = 5 * rng.randint(2, 12), 5 * rng.randint(200, 500)
        again = min(self.reached, 5 * rng.randint(5, 60)) if number > 1 else 0
        hang = (start + again + 300, start + again + 300 + rng.randint(50, 200)) if rng.random() < 0.5 else (0, 0)
        lost = (length - 450, length - 130) if rng.random() < 0.4 and hang[1] < length - 600 else (0, 0)
        early = {rank: length - rng.randint(40, 70) * 5 for rank in range(1, self.ranks) if is_last and not lost[1]}
        early = {rank: end for rank, end in early.items() if rng.random() < 0.5 and end > hang[1] + 100}
        weights = [rng.random() * scale for scale in (1, 0.4, 0.3, 0.1, 0.1)]
        for rank in range(self.ranks):
            measured = ["computing", *NAMES]
            seen = rng.choices(measured, weights, k=length)
            kernels = [one == "computing" and rng.random() < 0.8 for one in seen]
            missing = self._write(rank, begin, start, length, seen, kernels, hang, lost, early.get(rank, length))
            for second, one in enumerate(seen):
                name = (
                    "starting"
                    if second < start
                    else "hanging"
                    if hang[0] <= second < hang[1]
                    else "done again"
                    if second < start + again
                    else "idle"
                    if second >= early.get(rank, length)
                    else "unknown"
                    if second in missing
                    else one
                )
                self.truth[name] += self.cores / self.ranks
                on_gpu = "idle" if name == "computing" and not kernels[second] else name
                self.gpu_truth[on_gpu] += self.gpus / self.ranks
        # The worker's clock is wrong by hours, and jumps in the middle of the repeated steps.
        first, offset, lines = self.reached - again, rng.uniform(-9e3, 9e3), []
        for step in range(1, length - start - (hang[1] - hang[0])):
            offset += rng.choice([-700, 900]) if step == again // 2 else 0
            second = start + step + (hang[1] - hang[0] if start + step > hang[0] > 0 else 0)
            lines.append({"name": "loss", "value": 0.5, "time": BASE + begin + second + offset, "step": first + step})
        self.reached = first + len(lines)
        write_lines(folder.metrics / ("rank_0.jsonl" if number == 1 else f"rank_0.{number}.jsonl"), lines)
        folder.attempt(number).mkdir(parents=True, exist_ok=True)
        if hang[1]:
            write_lines(folder.hangs(number), [{"since_utc": at(begin + hang[0])}, {"until_utc": at(begin + hang[1])}])
        self.events += [
            {"time_utc": at(begin), "status": states.STARTING},
            {"time_utc": at(begin + 3), "status": states.RUNNING},
        ]
        self.now += length
        self.attempts.append(
            Attempt(
                number=number,
                started_utc=at(begin),
                ended_utc=at(self.now),
                cores=self.cores,
                gpus=self.gpus,
                world_size=self.ranks,
                cause=None if is_last else "node_lost",
            )
        )

    def _write(
        self,
        rank: int,
        begin: int,
        start: int,
        length: int,
        seen: list[str],
        kernels: list[bool],
        hang: tuple[int, int],
        lost: tuple[int, int],
        end: int,
    ) -> range:
        """Write the samples of a rank. Return the seconds without one."""
        log, since, kept, missing = self.loads.setdefault(rank, []), 5, 5, range(0)

        def put(name: str, value: float, second: int) -> None:
            log.append({"name": f"rank_{name}", "value": value, "time": 0.0, "step": BASE + begin + second})

        put("memory_gib", 1.0, 5)
        for second in range(10, length + 1, 5):
            if second > end:
                break
            factor = max((count for after, count in THINNED if second > after), default=1)
            if second - since < 5 * factor and second not in (start, end, length):
                continue
            span, since = range(since, second), second
            counts = Counter("communicating" if hang[0] <= one < hang[1] else seen[one] for one in span)
            counts = counts if second > start else Counter()
            if lost[0] < second <= lost[1]:
                continue
            if second - kept > 3 * 5 * factor:
                missing = range(kept, second - 5 * factor)
            kept = second
            put("memory_gib", 1.0, second)
            put("cpu_percent", 90.0, second)
            put("steps_s", 1.0 if second > start else 0.0, second)
            for name, key in NAMES.items():
                put(f"{key}_percent", round(100 * counts[name] / len(span), 3), second)
            if self.gpus:
                busy = sum(kernels[one] for one in span) if second > start else 0
                put("gpu_percent", round(100 * busy / len(span), 3), second)
        return missing


def simulate(tmp_path: Path, seed: int) -> tuple[Goodput, Simulated]:
    one = Simulated(seed)
    folder, fd = make_run(tmp_path / "runs", f"fit_17000000{seed:02d}_0123abcd", created_utc=at(0))
    os.close(fd)
    one.state(states.QUEUED, "queue", one.rng.randint(0, 900))
    one.state(states.PREPARING, "preparing", one.rng.randint(1, 200))
    count = one.rng.randint(1, 4)
    for number in range(count):
        one.attempt(folder, is_last=number == count - 1)
        if number < count - 1:
            one.state(states.STARTING, "starting", one.rng.randint(1, 40))
    one.state(states.FINALIZING, "preparing", one.rng.randint(1, 60))
    one.events.append({"time_utc": at(one.now), "status": states.COMPLETED})
    write_lines(folder.events, one.events)
    with folder.events.open("a") as file:
        file.write('{"time_u')
    for rank, lines in one.loads.items():
        write_lines(folder.load_log(rank), lines, torn=True)
    return goodput(folder, changed(folder, one.attempts, one.now)), one


def changed(folder: RunFolder, attempts: list[Attempt], end: float) -> Any:
    from dataclasses import replace

    record = read.record(folder)
    return replace(record, status=states.COMPLETED, attempts=tuple(attempts), ended_utc=at(end))


def shares(used: Any) -> dict[str, float]:
    total = sum(used.values())
    return {name: 100 * used[name] / total for name in CLASSES} if total else {}


@pytest.mark.parametrize("seed", range(20))
def test_goodput_shares_of_a_simulated_run_differ_from_its_true_shares_by_at_most_half_a_percent(
    tmp_path: Path, seed: int
) -> None:
    found, truth = simulate(tmp_path, seed)
    for used, known in ((found.core_s, truth.truth), (found.gpu_s, truth.gpu_truth)):
        mine, wanted = shares(used), shares(known)
        assert {n: round(v, 2) for n, v in mine.items() if abs(v - wanted[n]) > 0.5} == {}, wanted
        assert sum(mine.values()) == pytest.approx(100 if mine else 0, abs=0.5)
    assert sum(found.core_s.values()) == pytest.approx(sum(truth.truth.values()), rel=0.005)


def small_run(tmp_path: Path, **job: Any) -> tuple[RunFolder, Goodput]:
    """A run of 100 s in one attempt of 80 s on 8 cores and 2 GPUs, without samples."""
    folder, fd = make_run(tmp_path / "runs", created_utc=at(0), job=make_job(**job))
    os.close(fd)
    attempt = Attempt(number=1, started_utc=at(20), ended_utc=at(100), cores=8, gpus=2)
    write_lines(folder.events, [{"time_utc": at(20), "status": states.RUNNING}])
    return folder, goodput(folder, changed(folder, [attempt], 100))


def test_goodput_counts_time_without_load_samples_as_unknown_and_no_energy_for_queue_time(tmp_path: Path) -> None:
    _, found = small_run(tmp_path)
    assert {name: value for name, value in found.core_s.items() if value} == {"queue": 160, "unknown": 640}
    assert found.gpu_s["unknown"] == 160
    assert found.energy_kwh == pytest.approx((640 * 10 + 160 * 300) / 3.6e6)
    assert found.energy_source == "model: 10 W for each core held; model: 300 W for each GPU held"
    assert (found.ettr, found.price) == (0.0, None)


def test_goodput_price_is_computed_from_target_prices_and_energy_from_measured_power(tmp_path: Path) -> None:
    folder, _ = small_run(tmp_path)
    target = {"name": "lab", "kind": "ssh", "settings": {"core_price": 0.5, "gpu_price": 3}}
    folder.target.write_text(json.dumps(target))
    steps = [BASE + second for second in range(20, 101, 5)]
    watts = [("cpu_watts", 100.0), ("gpu0_watts", 400.0), ("gpu1_watts", 500.0)]
    lines = [{"name": name, "value": value, "step": step} for step in steps for name, value in watts]
    write_lines(folder.node_log(0), lines)
    record = read.record(folder)
    found = goodput(
        folder, changed(folder, [Attempt(number=1, started_utc=at(20), ended_utc=at(100), cores=8, gpus=2)], 100)
    )
    assert record.job is not None
    assert found.energy_kwh == pytest.approx(80 * 1000 / 3.6e6)
    assert found.energy_source == "measured by RAPL; measured by NVML"
    assert found.price == pytest.approx(0.5 * 640 / 3600 + 3 * 160 / 3600)


def test_goodput_counts_the_cpu_use_of_a_script_without_step_counters_as_computing(tmp_path: Path) -> None:
    folder, _ = small_run(tmp_path)
    values = [("rank_memory_gib", 1.0), ("rank_cpu_percent", 200.0)]
    lines = [{"name": n, "value": v, "step": BASE + second} for second in range(20, 101, 5) for n, v in values]
    write_lines(folder.load_log(0), lines)
    record = changed(folder, [Attempt(number=1, started_utc=at(20), ended_utc=at(100), cores=8, gpus=0)], 100)
    found = goodput(folder, record)
    assert found.core_s["computing"] == pytest.approx(0.25 * 640, rel=0.005)
    assert found.core_s["idle"] == pytest.approx(0.75 * 640, rel=0.005)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.sampled_from([at(0), at(50), at(-1e6), "0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59Z", 10**400, -1, "NaN"]),
)
LINES = st.lists(
    st.one_of(
        HOSTILE,
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(
                    [
                        *(f"rank_{name}_percent" for name in ("wait", "data", "cpu", "gpu")),
                        "rank_steps_s",
                        "rank_memory_gib",
                        "cpu_watts",
                        "loss",
                    ]
                )
                | HOSTILE,
                "value": st.floats(-50, 500) | HOSTILE,
                "step": st.integers(BASE - 50, BASE + 300) | st.integers(0, 9) | HOSTILE,
                "time": st.floats(BASE - 50, BASE + 300) | HOSTILE,
                "time_utc": st.integers(-50, 300).map(at) | HOSTILE,
                "since_utc": st.integers(-50, 300).map(at) | HOSTILE,
                "until_utc": st.integers(-50, 300).map(at) | HOSTILE,
                "status": st.sampled_from(states.ALL) | HOSTILE,
            }
        ),
    ),
    max_size=12,
)
TIMES = st.integers(-50, 300).map(at) | HOSTILE
ATTEMPTS = st.lists(
    st.tuples(TIMES, TIMES, HOSTILE | st.integers(0, 99), HOSTILE, HOSTILE, st.integers(1, 3) | HOSTILE), max_size=3
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=LINES, load=LINES, log=LINES, hangs=LINES, attempts=ATTEMPTS, created=TIMES, ended=TIMES, load_json=HOSTILE
)
def test_goodput_shares_of_any_record_are_not_negative_and_sum_to_100(
    tmp_path: Path,
    events: Any,
    load: Any,
    log: Any,
    hangs: Any,
    attempts: Any,
    created: Any,
    ended: Any,
    load_json: Any,
) -> None:
    from dataclasses import replace

    folder = RunFolder(tmp_path / "runs" / "fit_1700000000_0123abcd")
    if not folder.path.exists():
        os.close(make_run(tmp_path / "runs", folder.run_id)[1])
    for path, lines in [
        (folder.events, events), (folder.load_log(0), load), (folder.load_log(3), log), (folder.node_log(0), load),
        (folder.metrics / "rank_0.jsonl", log), (folder.metrics / "rank_0.2.jsonl", load), (folder.hangs(1), hangs),
    ]:  # fmt: skip
        write_lines(path, lines, torn=len(lines) > 6)
    write_lines(folder.load(1), [{"every_s": load_json}])
    write_lines(folder.target, [{"settings": {"core_price": load_json}}])
    made = tuple(
        Attempt(number=number, started_utc=begin, ended_utc=end, cores=cores, gpus=gpus, world_size=size)
        for begin, end, cores, gpus, size, number in attempts
    )
    record = replace(read.record(folder), attempts=made, created_utc=created, ended_utc=ended, status=states.COMPLETED)
    found = goodput(folder, record)
    assert all(value >= 0 for used in (found.core_s, found.gpu_s, found.percent) for value in used.values())
    assert sum(found.percent.values()) == pytest.approx(100, abs=0.5)
    assert 0 <= found.ettr <= 1.000001
    assert all(math.isfinite(value) for value in (found.energy_kwh, found.seconds, found.price or 0.0))
