"""Sample the resource use of a run's nodes and workers.

metrics/node_<n>.jsonl, load_<rank>.jsonl     series, as metric logs with seconds since 1970 as steps
attempts/<k>/load.json                        the last sample, and the ranks' pace (`paceline.observe.stragglers`)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import EngineError
from paceline.job.plan import Launch
from paceline.launchers import environment
from paceline.observe.node.messages import WatchedWorkers
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.record import utc_now
from paceline.system.files import write_json

# These modules are imported with the first sample, so that supervisors start sooner. Short runs have no sample.
if TYPE_CHECKING:
    from paceline.observe.stragglers import Counted, RunPace

#: Variable with the seconds between two samples of the workers' load (0: no samples), and its default.
SECONDS_VARIABLE, SECONDS = "PACELINE_SAMPLE_SECONDS", 5.0
#: (seconds since the start, number of samples that are merged into one sample from then on). Merging keeps the file small.
THINNED = ((600.0, 6), (6 * 3600.0, 24))
#: Values of a worker's load that get no series (log over time): process counts, and totals since the worker's start.
_NOT_KEPT = ("pid", "processes", "age_s", "steps", "data_s", "wait_s", "eval_s", "save_s")
#: Only ranks below this number have series: thousands of files would delay the supervisor. The last sample has all ranks.
MOST_SERIES = 256
#: Number of samples that are kept for the report of a worker that ran out of memory.
_REMEMBERED = 60
#: Numbers of time windows: how many to search for a straggler, how many to keep, and how many of the oldest to merge in pairs.
_RECENT, _MOST, _OLD = 12, 240, 200


def merged_samples(passed_s: float) -> int:
    """Return how many samples to average into one, `passed_s` seconds into the attempt."""
    return max((count for after_s, count in THINNED if passed_s > after_s), default=1)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The resource use of nodes and workers at one moment.

    at_s: Time in seconds since 1970.
    nodes, ranks: Values by node rank and by worker rank, such as {"cpu_percent": 87.5} (`paceline.observe.node.load`).
    """

    at_s: float
    nodes: Mapping[int, Mapping[str, float]]
    ranks: Mapping[int, Mapping[str, float]]


class LoadWatch:
    """A writer of samples (`Sample`) every few seconds during an attempt.

    pids: Returns the known pids of workers by rank.
    look_where: Called with ranks that are new stragglers, to find their line of code. The function may call `note_place` later.
    """

    def __init__(
        self,
        nodes: Any,
        folder: RunFolder,
        launch: Launch,
        pids: Callable[[], Mapping[int, int]],
        look_where: Callable[[tuple[int, ...]], None] = lambda ranks: None,
    ) -> None:
        self._ask = getattr(nodes, "loads", None)
        self._folder, self._launch, self._pids, self._look_where = folder, launch, pids, look_where
        self._every_s = sample_seconds(os.environ)
        self._logs: dict[str, MetricLog] = {}
        self._kept: dict[str, list[dict[str, float]]] = {}
        self._began = self._next = time.monotonic()
        self._is_first = True
        self._names = {place.rank: launch.nodes[place.node_rank].name for place in launch.places}
        self._counts: dict[int, tuple[float, dict[str, float]]] = {}
        self._windows: list[dict[int, Counted]] = []
        self._count = 0
        self._asked: set[tuple[int, ...]] = set()
        self._place: tuple[tuple[int, ...], str, float] | None = None
        #: The ranks that are slow now, and the UTC time at which they became slow.
        self._slow: tuple[tuple[int, ...], str] = ((), "")
        #: The most recent samples, in order of time.
        self.samples: deque[Sample] = deque(maxlen=_REMEMBERED)

    def look(self) -> None:
        """Take a sample if one is due. The first call only starts the measurement."""
        now = time.monotonic()
        if self._ask is None or not self._every_s or now < self._next:
            return
        self._next = now + self._every_s
        if self._is_first:
            # Don't sample yet: many runs end before their first sample.
            self._is_first, self._next = False, now + self._every_s / 2
            return
        # A full disk or a silent node may cost a sample of the load, but must not end the run.
        with contextlib.suppress(OSError, EngineError):
            self._take(self._ask(self._workers()))
        # If nodes answer slowly, ask less often: the supervisor waits at most a tenth of its time for them.
        self._next = max(self._next, time.monotonic() + 10 * (time.monotonic() - now))

    def pace(self) -> RunPace:
        """Return how the ranks have spent the attempt's time, and the straggler."""
        from paceline.observe.stragglers import pace_of

        return self._placed(pace_of(self._windows, self._names))

    def end_text(self) -> str | None:
        """Return a sentence on a straggler that cost the run much time, or None."""
        return self.pace().end_text if self._windows else None

    def note_place(self, ranks: tuple[int, ...], place: str, share: float) -> None:
        """Store a straggler's most frequent line of code, and its share of time."""
        self._place = (ranks, place, share)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for name in list(self._kept):
                self._flush(name)
            if self.samples:
                self._write_last(self.samples[-1], self.pace())
        for log in self._logs.values():
            log.close()

    def _workers(self) -> dict[int, WatchedWorkers]:
        pids = self._pids()
        # Processes in a container have other pids outside the container.
        is_apart = self._launch.prepared[0].container is not None
        found: dict[int, WatchedWorkers] = {}
        for place in self._launch.places:
            one = found.setdefault(
                place.node_rank,
                {"folder": str(environment.watch_dir(self._launch)), "run_id": self._launch.run_id, "ranks": {}},
            )
            if is_apart or place.rank in pids:
                one["ranks"][str(place.rank)] = 0 if is_apart else pids[place.rank]
        return found

    def _take(self, told: Mapping[int, Mapping[str, Any]]) -> None:
        from paceline.observe.stragglers import pace_of

        now, at_s = time.monotonic(), time.time()
        nodes = {node: {name: v for name, v in one.items() if name != "ranks"} for node, one in told.items()}
        ranks = {int(rank): dict(load) for one in told.values() for rank, load in one.get("ranks", {}).items()}
        sample = Sample(at_s=at_s, nodes=nodes, ranks=ranks)
        self.samples.append(sample)
        self._count += 1
        self._add_window(ranks, now)
        for node, load in nodes.items():
            self._keep(f"node {node}", load, at_s, now)
        for rank, load in ((rank, load) for rank, load in ranks.items() if rank < MOST_SERIES):
            values = {f"rank_{name}": value for name, value in load.items() if name not in _NOT_KEPT}
            self._keep(f"rank {rank}", values, at_s, now)
        judged = self._since(self._placed(pace_of(self._windows, self._names, recent=_RECENT)))
        self._write_last(sample, judged)
        if judged.straggler is not None and judged.straggler.ranks not in self._asked and len(self._asked) < 3:
            self._asked.add(judged.straggler.ranks)
            self._look_where(judged.straggler.ranks)

    def _add_window(self, ranks: Mapping[int, Mapping[str, float]], now: float) -> None:
        from paceline.observe.stragglers import Counted, is_training

        window: dict[int, Counted] = {}
        for place in self._launch.places:
            load = ranks.get(place.rank)
            if load is None or "steps" not in load:
                continue
            counts = {name: load[name] for name in ("steps", "data_s", "wait_s")}
            before_s, before = self._counts.get(place.rank, (now, counts))
            self._counts[place.rank] = (now, counts)
            if now > before_s and counts["steps"] >= before["steps"]:
                window[place.rank] = Counted(
                    now - before_s,
                    counts["steps"] - before["steps"],
                    counts["data_s"] - before["data_s"],
                    counts["wait_s"] - before["wait_s"],
                )
        if len(window) == sum(place.role == "worker" for place in self._launch.places) and is_training(window):
            self._windows.append(window)
        if len(self._windows) > _MOST:
            # Merge the old windows of a long training in pairs. This keeps their totals, and limits the memory that they need.
            pairs = zip(self._windows[:_OLD:2], self._windows[1:_OLD:2], strict=True)
            joined = [{rank: one + second[rank] for rank, one in first.items()} for first, second in pairs]
            self._windows = joined + self._windows[_OLD:]

    def _placed(self, pace: RunPace) -> RunPace:
        found = pace.straggler
        if found is None or self._place is None or found.ranks != self._place[0]:
            return pace
        _, place, share = self._place
        return replace(pace, straggler=replace(found, place=place, place_share=share))

    def _since(self, pace: RunPace) -> RunPace:
        found = pace.straggler
        ranks = found.ranks if found is not None else ()
        if ranks != self._slow[0]:
            self._slow = (ranks, utc_now())
        return pace if found is None else replace(pace, straggler=replace(found, since_utc=self._slow[1]))

    def _keep(self, name: str, values: dict[str, float], at_s: float, now: float) -> None:
        self._kept.setdefault(name, []).append({**values, "at_s": at_s})
        if len(self._kept[name]) >= merged_samples(now - self._began):
            self._flush(name)

    def _flush(self, name: str) -> None:
        kept = self._kept.pop(name)
        kind, _, number = name.partition(" ")
        if name not in self._logs:
            path = self._folder.node_log(int(number)) if kind == "node" else self._folder.load_log(int(number))
            self._logs[name] = MetricLog(path)
        # Use the time as the step, so that the page of the run can draw all nodes over the same axis.
        at = int(kept[-1]["at_s"])
        for value in dict.fromkeys(value for one in kept for value in one if value != "at_s"):
            found = [one[value] for one in kept if value in one]
            most = max(found) if "memory" in value else sum(found) / len(found)
            self._logs[name].scalar(value, round(most, 3), at)

    def _write_last(self, sample: Sample, pace: RunPace) -> None:
        write_json(
            self._folder.load(self._launch.attempt),
            {
                "time": round(sample.at_s, 3),
                "every_s": self._every_s,
                "attempt": self._launch.attempt,
                "nodes": {
                    str(node): {"name": self._launch.nodes[node].name, **load} for node, load in sample.nodes.items()
                },
                "ranks": {
                    str(rank): {"node": self._names.get(rank, ""), **load}
                    for rank, load in sorted(sample.ranks.items())
                },
                "pace": pace.to_json(),
            },
        )


def sample_seconds(environ: Mapping[str, str]) -> float:
    """Return the seconds between two samples, from the variable PACELINE_SAMPLE_SECONDS.

    The result is at least 1, or 0 to take no samples. Default, also for a value that is not a number: 5.
    """
    try:
        seconds = float(environ.get(SECONDS_VARIABLE, SECONDS))
    except ValueError:
        return SECONDS
    return 0.0 if seconds <= 0 else max(seconds, 1.0)
