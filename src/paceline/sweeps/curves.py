"""The primary metric of a child, read as it grows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.children.child import RecordWatch
from paceline.runs import metrics
from paceline.runs.folder import RunFolder, metric_logs
from paceline.runs.metric_reader import FolderListing, LogTail
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial


@dataclass(frozen=True)
class Series:
    """A trial's values so far, and the steps with which they were logged; None for one without."""

    values: tuple[float, ...] = ()
    steps: tuple[float | None, ...] = ()

    def before(self, steps: Sequence[float | None]) -> Series:
        """What of it stays when a later run has logged these steps: as attempts of one run are put together, all before the first
        of them. A value without a step has no place that could be compared, and stays.
        """
        first = min((step for step in steps if step is not None), default=math.inf)
        kept = [(v, s) for v, s in zip(self.values, self.steps, strict=True) if s is None or s < first]
        return Series(tuple(v for v, _ in kept), tuple(s for _, s in kept))

    def then(self, reader: CurveReader) -> Series:
        """It, followed by what a later run has logged by its last look."""
        values, steps = reader.look(), reader.steps
        head = self.before(steps)
        return Series(head.values + values, head.steps + steps)


class CurveReader:
    """Reads what is new in a run's metric logs, so that a look costs what has been added and not what is there.

    Of several ranks that log the metric, rank 0's series counts, else the lowest rank's that has it. After a restart a
    series is put together from all attempts, as `runs.metrics` does it.
    """

    def __init__(self, directory: Path, metric: str) -> None:
        self._directory = directory
        self._metric = metric
        # The bytes that the writer puts there, which uses `json.dumps` too: a line without them need not be parsed.
        self._needle = json.dumps(metric).encode()
        self._listing = FolderListing(directory)
        self._logs: dict[int, dict[int, Path]] = {}
        self._tails: dict[Path, LogTail] = {}
        self._sizes: dict[Path, int] = {}
        self._series: dict[int, list[float]] = {}
        #: The steps that were logged with them.
        self._steps: dict[int, list[float | None]] = {}

    def look(self) -> tuple[float, ...]:
        """The curve as it is now: numbers in order of their logging; what is no number is left out."""
        if self._listing.is_due():
            self._logs = metric_logs(self._directory)
        logs = self._logs
        # A rank with a second log was restarted and may have repeated steps, so the series is put together anew from all
        # attempts.
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
        """The steps with which the values of the last look were logged; None for one without."""
        rank = self._rank
        return () if rank is None else tuple(self._steps[rank])

    @property
    def _rank(self) -> int | None:
        # A lower rank that logs the metric later takes over; one with an empty series does not count.
        return min((rank for rank, series in self._series.items() if series), default=None)

    @property
    def by_rank(self) -> dict[int, tuple[float, ...]]:
        """What each rank has logged of the metric by the last look, of those that have logged it."""
        return {rank: tuple(series) for rank, series in sorted(self._series.items()) if series}

    @property
    def names(self) -> set[str]:
        """All metrics that the run has logged, for a message where the one that was asked for is not among them."""
        return set(metrics.entries_by_name(self._directory))

    def _read_on(self, rank: int, path: Path) -> None:
        tail = self._tails.setdefault(path, LogTail(path))
        with contextlib.suppress(OSError):
            for data in tail.chunks():
                for line in data.split(b"\n"):
                    if self._needle in line:
                        self._take(line, rank)

    def _take(self, line: bytes, rank: int) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return  # cut short by a kill
        if isinstance(entry, dict) and entry.get("name") == self._metric:
            self._add(entry, rank)

    def _add(self, entry: Mapping[str, Any], rank: int) -> None:
        if (number := _number(entry)) is not None:
            self._series.setdefault(rank, []).append(number)
            self._steps.setdefault(rank, []).append(_step(entry))

    def _read_again(self, logs: dict[int, dict[int, Path]]) -> None:
        sizes = {path: path.stat().st_size for paths in logs.values() for path in paths.values()}
        # No log has grown: reading all attempts at each look would cost more the longer a trial runs.
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self._series, self._steps = {}, {}
        for rank in logs:
            for entry in metrics.entries_by_name(self._directory, name=self._metric, rank=rank).get(self._metric, ()):
                self._add(entry, rank)


def _number(entry: Mapping[str, Any]) -> float | None:
    """The value of a metric's line where it is a number; a list, a table, a text and a truth value are none."""
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or entry.get("kind"):
        return None
    return float(value)


def _step(entry: Mapping[str, Any]) -> float | None:
    step = entry.get("step")
    return step if isinstance(step, (int, float)) and math.isfinite(step) else None


class Watch:
    """Looks again and again at one trial, which runs."""

    def __init__(self, trial: Trial, runs_dir: Path, spec: SweepSpec) -> None:
        folder = RunFolder(runs_dir / trial.run_id)
        #: What its runs before have logged of the primary metric.
        self._earlier = Series()
        for leg in trial.earlier:
            self._earlier = self._earlier.then(CurveReader(RunFolder(runs_dir / leg.run_id).metrics, spec.metric))
        self._curve, *self._further = (CurveReader(folder.metrics, metric) for metric in spec.metrics)
        self._record = RecordWatch(folder)

    def look(self, trial: Trial) -> Trial:
        """The trial as it is now; the same object where nothing has changed."""
        told = self._record.changed()
        if told is not None and told["status"] != trial.status:
            started = trial.started_utc if trial.earlier else told.get("started_utc")
            ended = told.get("ended_utc")
            trial = dataclasses.replace(trial, status=told["status"], started_utc=started, ended_utc=ended)
        # After the record: what was logged before a run's end is in the curve that is seen with it.
        if self._further:
            further = tuple(reader.look() for reader in self._further)
            trial = trial if further == trial.further else dataclasses.replace(trial, further=further)
        own = self._curve.look()
        if len(own) == len(trial.curve) - trial.begin:
            return trial
        head = self._earlier.before(self._curve.steps).values if self._earlier.values else ()
        return dataclasses.replace(trial, curve=head + own, begin=len(head))
