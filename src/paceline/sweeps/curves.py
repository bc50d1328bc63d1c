"""The primary metric of a child, read as it grows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.runs import metrics
from paceline.runs.folder import metric_logs


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
        self._read: dict[Path, int] = {}
        self._series: dict[int, list[float]] = {}

    def look(self) -> tuple[float, ...]:
        """The curve as it is now: numbers in order of their logging; what is no number is left out."""
        logs = metric_logs(self._directory)
        # A rank with a second log was restarted and may have repeated steps, so the series is put together anew from all
        # attempts.
        if any(len(paths) > 1 for paths in logs.values()):
            self._read_again(logs)
        else:
            for rank, paths in logs.items():
                for path in paths.values():
                    self._read_on(rank, path)
        for rank in sorted(self._series):
            # A lower rank that logs the metric later takes over; one with an empty series does not count.
            if self._series[rank]:
                return tuple(self._series[rank])
        return ()

    @property
    def names(self) -> set[str]:
        """All metrics that the run has logged, for a message where the one that was asked for is not among them."""
        return set(metrics.entries_by_name(self._directory))

    def _read_on(self, rank: int, path: Path) -> None:
        begin = self._read.get(path, 0)
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size <= begin:
                    return
                file.seek(begin)
                data = file.read()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1  # a line without its end is being written
        self._read[path] = begin + whole
        series = self._series.setdefault(rank, [])
        for line in data[:whole].split(b"\n"):
            if self._needle in line:
                self._take(line, series)

    def _take(self, line: bytes, series: list[float]) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return  # cut short by a kill
        if isinstance(entry, dict) and entry.get("name") == self._metric and (number := _number(entry)) is not None:
            series.append(number)

    def _read_again(self, logs: dict[int, dict[int, Path]]) -> None:
        sizes = {path: path.stat().st_size for paths in logs.values() for path in paths.values()}
        # No log has grown: reading all attempts at each look would cost more the longer a trial runs.
        if sizes == self._read:
            return
        self._read = sizes
        self._series = {
            rank: [
                number
                for entry in metrics.entries_by_name(self._directory, name=self._metric, rank=rank).get(
                    self._metric, ()
                )
                if (number := _number(entry)) is not None
            ]
            for rank in logs
        }


def _number(entry: Mapping[str, Any]) -> float | None:
    """The value of a metric's line where it is a number; a list, a table, a text and a truth value are none."""
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or entry.get("kind"):
        return None
    return float(value)
