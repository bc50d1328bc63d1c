"""Incremental readers of a trial's metrics and status."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.children.child import RecordWatch
from paceline.runs import metrics
from paceline.runs.folder import RunFolder, metric_logs
from paceline.runs.metric_reader import FolderListing, LogTail
from paceline.runs.search.summaries import as_float
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.system.files import gone_is_fine


@dataclass(frozen=True)
class Series:
    """The values of a metric that a trial has logged, with their steps."""

    values: tuple[float, ...] = ()
    steps: tuple[float | None, ...] = ()

    def before(self, steps: Sequence[float | None]) -> Series:
        """Return the values before the first step of a later run of the trial.

        The result includes values without a step. steps: The steps of the later run.
        """
        first = min((step for step in steps if step is not None), default=math.inf)
        kept = [(v, s) for v, s in zip(self.values, self.steps, strict=True) if s is None or s < first]
        return Series(tuple(v for v, _ in kept), tuple(s for _, s in kept))

    def then(self, reader: CurveReader) -> Series:
        """Return this series, continued by the values of a later run of the trial."""
        values, steps = reader.look(), reader.steps
        head = self.before(steps)
        return Series(head.values + values, head.steps + steps)


class CurveReader:
    """An incremental reader of one metric from a run's metric logs.

    The reader uses the lowest rank that logs the metric. A later attempt replaces all values from its first step on.
    """

    def __init__(self, directory: Path, metric: str) -> None:
        self._directory = directory
        self._metric = metric
        # Only lines with these bytes are parsed. The logs' writer uses `json.dumps` too, so no line of the metric is missed.
        self._needle = json.dumps(metric).encode()
        self._listing = FolderListing(directory)
        self._logs: dict[int, dict[int, Path]] = {}
        self._tails: dict[Path, LogTail] = {}
        self._sizes: dict[Path, int] = {}
        self._series: dict[int, list[float]] = {}
        #: The step of each value in `_series`.
        self._steps: dict[int, list[float | None]] = {}

    def look(self) -> tuple[float, ...]:
        """Read new log lines. Return all values of the metric in order."""
        if self._listing.is_due():
            self._logs = metric_logs(self._directory)
        logs = self._logs
        # A restarted rank may have repeated steps, so all attempts are read and joined again.
        if any(len(paths) > 1 for paths in logs.values()):
            self._read_again(logs)
        else:
            for rank, paths in logs.items():
                for path in paths.values():
                    self._read_on(rank, path)
        chosen = self._rank
        return () if chosen is None else tuple(self._series[chosen])

    @property
    def steps(self) -> tuple[float | None, ...]:
        """The steps (or None) of the values that the last call of `look` returned."""
        rank = self._rank
        return () if rank is None else tuple(self._steps[rank])

    @property
    def _rank(self) -> int | None:
        # Use the lowest rank with values. Another rank follows if a lower rank starts to log later.
        return min((rank for rank, series in self._series.items() if series), default=None)

    @property
    def by_rank(self) -> dict[int, tuple[float, ...]]:
        """The values of each rank, as the last call of `look` read them."""
        return {rank: tuple(series) for rank, series in sorted(self._series.items()) if series}

    @property
    def names(self) -> set[str]:
        """The names of all metrics that the run has logged."""
        return set(metrics.entries_by_name(self._directory))

    def _read_on(self, rank: int, path: Path) -> None:
        tail = self._tails.setdefault(path, LogTail(path))
        with gone_is_fine():
            for data in tail.chunks():
                for line in data.split(b"\n"):
                    if self._needle in line:
                        self._take(line, rank)

    def _take(self, line: bytes, rank: int) -> None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return  # a killed process has left a partial line
        if isinstance(entry, dict) and entry.get("name") == self._metric:
            self._add(entry, rank)

    def _add(self, entry: Mapping[str, object], rank: int) -> None:
        if (number := _number(entry)) is not None:
            self._series.setdefault(rank, []).append(number)
            self._steps.setdefault(rank, []).append(_step(entry))

    def _read_again(self, logs: dict[int, dict[int, Path]]) -> None:
        sizes = {path: path.stat().st_size for paths in logs.values() for path in paths.values()}
        # Skip logs with unchanged sizes, because reading all attempts each time is slow.
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self._series, self._steps = {}, {}
        for rank in logs:
            for entry in metrics.entries_by_name(self._directory, name=self._metric, rank=rank).get(self._metric, ()):
                self._add(entry, rank)


def _number(entry: Mapping[str, object]) -> float | None:
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or entry.get("kind"):
        return None
    return as_float(value)


def _step(entry: Mapping[str, object]) -> float | None:
    step = entry.get("step")
    return step if isinstance(step, (int, float)) and math.isfinite(as_float(step)) else None


class Watch:
    """A reader of the status and metrics of a live trial's run."""

    def __init__(self, trial: Trial, runs_dir: Path, spec: SweepSpec) -> None:
        folder = RunFolder(runs_dir / trial.run_id)
        #: The series of the primary metric that the trial's earlier runs have logged.
        self._earlier = Series()
        for leg in trial.earlier:
            self._earlier = self._earlier.then(CurveReader(RunFolder(runs_dir / leg.run_id).metrics, spec.metric))
        self._curve, *self._further = (CurveReader(folder.metrics, metric) for metric in spec.metrics)
        self._record = RecordWatch(folder)

    def look(self, trial: Trial) -> Trial:
        """Return the trial with its new status and values; without changes, `trial` itself."""
        state = self._record.changed()
        if state is not None and state["status"] != trial.status:
            started = trial.started_utc if trial.earlier else state.get("started_utc")
            ended = state.get("ended_utc")
            trial = dataclasses.replace(trial, status=state["status"], started_utc=started, ended_utc=ended)
        # Read the metrics after the record, so that the curve of an ended trial has all its values.
        if self._further:
            further = tuple(reader.look() for reader in self._further)
            trial = trial if further == trial.further else dataclasses.replace(trial, further=further)
        own = self._curve.look()
        # Compare values: a restarted attempt may have replaced a value without logging further values.
        if own == trial.curve[trial.begin :]:
            return trial
        head = self._earlier.before(self._curve.steps).values if self._earlier.values else ()
        return dataclasses.replace(trial, curve=head + own, begin=len(head))
