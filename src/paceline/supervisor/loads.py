"""How busy a run's nodes are, written beside its metrics (`metrics/node_<n>.jsonl`), for the page's curves."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from paceline.errors import EngineError
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog

#: Between two looks: often while somebody waits to see whether it works, seldom in the days after, so that the file stays small.
_OFTEN_S, _SELDOM_S, _OFTEN_FOR_S = 5.0, 30.0, 600.0


class LoadWatch:
    """Asks the nodes, where they tell. The first look begins to measure: a run of a second has none."""

    def __init__(self, nodes: Any, folder: RunFolder) -> None:
        self._ask = getattr(nodes, "loads", None)
        self._folder = folder
        self._logs: dict[int, MetricLog] = {}
        self._began = self._next = time.monotonic()
        self._is_first = True

    def look(self) -> None:
        """Ask the nodes, if it is time to."""
        now = time.monotonic()
        if self._ask is None or now < self._next:
            return
        self._next = now + (_OFTEN_S if now - self._began < _OFTEN_FOR_S else _SELDOM_S)
        if self._is_first:
            # Nothing is asked yet: it would be asked of runs that end before there is anything to say.
            self._is_first, self._next = False, now + _OFTEN_S / 2
            return
        # Curves are not worth a run: neither a full disk nor a node that does not answer ends it for them.
        with contextlib.suppress(OSError, EngineError):
            self._write(self._ask())

    def _write(self, loads: dict[int, dict[str, float]]) -> None:
        at = int(time.time())
        for node_rank, load in loads.items():
            if node_rank not in self._logs:
                self._logs[node_rank] = MetricLog(self._folder.node_log(node_rank))
            for name, value in load.items():
                # The time as the step: by it the page draws all nodes over one another.
                self._logs[node_rank].scalar(name, value, at)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
