"""The latest metric values of runs, read from the ends of their metric logs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.runs.metric_reader import last_entries
from paceline.ui.index import IndexEntry

#: Bytes that are read from the end of a log. They almost always have the latest line of each name.
_BYTES = 4096
_NAMES = 3
#: Most runs in the cache. A page has a hundred runs.
_MOST = 2000

_Values = list[tuple[str, Any]]


class LatestValues:
    """A cache of the runs' latest values, which are read again after a log has grown."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._known: dict[str, tuple[tuple[int, int], _Values]] = {}

    def of(self, entries: Iterable[IndexEntry]) -> dict[str, _Values]:
        """Return run id -> names and values of rank 0 in the last attempt that has logged any."""
        return {entry.run_id: self._look(entry) for entry in entries}

    def _look(self, entry: IndexEntry) -> _Values:
        folder = RunFolder(self._runs_dir / entry.run_id)
        for attempt in range(max(1, entry.attempts), 0, -1):
            path = folder.metric_log(0, attempt)
            try:
                found = os.stat(path)
            except OSError:
                continue
            stamp = (found.st_mtime_ns, found.st_size)
            known = self._known.get(entry.run_id)
            if known is None or known[0] != stamp:
                if len(self._known) >= _MOST:
                    self._known.clear()
                known = self._known[entry.run_id] = (stamp, _last_values(path))
            return known[1]
        return []


def _last_values(path: Path) -> _Values:
    values = {
        entry["name"]: entry["value"]
        for entry in last_entries(path, _BYTES)
        if "kind" not in entry and isinstance(entry["value"], (int, float))
    }
    return sorted(values.items(), key=_interest)[:_NAMES]


def _interest(item: tuple[str, Any]) -> tuple[bool, bool, str]:
    """Return a sort key: the primary metric comes first, then losses, then others."""
    name = item[0].lower()
    return not name.startswith(("val", "test", "eval")), "loss" not in name, name
