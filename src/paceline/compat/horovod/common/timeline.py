"""A trace of the collectives that rank 0 writes for chrome://tracing and Perfetto.

As in Horovod, each tensor has a row (`pid`). NEGOTIATE_ALLREDUCE lasts from the first rank's request to the last
rank's; the arrival of each request is an event named after the rank. Then ALLREDUCE lasts until the result is there.

    NEGOTIATE_ALLREDUCE |0------1---2|  ALLREDUCE |------|

The file is readable after every event, even if the job is killed: viewers accept a JSON array without closing bracket.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from paceline.collectives import Engine
    from paceline.collectives.request import Request

#: Protects only `_trace`. A thread of the engine that holds the other lock, a trace's own, must not take this lock.
_lock = threading.Lock()
_trace: _Trace | None = None


def begin(engine: Engine) -> None:
    """Start a trace if HOROVOD_TIMELINE names its file. Called by `init`."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        start(path, engine, mark_cycles=os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def start(path: str, engine: Engine, *, mark_cycles: bool) -> None:
    """Write a new trace of collectives to `path` on rank 0."""
    # With `mark_cycles`, write a CYCLE_START line before each list of operations on which the ranks have agreed.
    global _trace
    # Stop the old trace before taking the lock, because `stop` takes the same lock.
    stop()
    with _lock:
        if engine.rank == 0:
            _trace = _Trace(path, mark_cycles, engine)
            engine.observe(_trace.observed, arrivals=True)
            # Few scripts call shutdown, so close the file at exit. Without the closing bracket, json.load fails (viewers accept
            # the file). Unregister an earlier entry first, because atexit keeps one entry for each call.
            atexit.unregister(_stop_at_exit)
            atexit.register(_stop_at_exit, os.getpid())


def stop() -> None:
    """Close the trace, if one is open."""
    global _trace
    with _lock:
        trace, _trace = _trace, None
    if trace is not None:
        # Make the engine stop calling `observed` first. A call that still runs only writes to the file if the file is open.
        trace.engine.ignore(trace.observed)
        trace.close()


end = stop


def _stop_at_exit(pid: int) -> None:
    if os.getpid() == pid:  # in a forked child, which shares the open file, write nothing
        stop()


class _Trace:
    def __init__(self, path: str, mark_cycles: bool, engine: Engine) -> None:
        self.engine = engine
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write("[\n")
        self._lines: dict[tuple[str, str], int] = {}
        # Protects `observed`, because the threads of several process sets may call it at the same time.
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        start = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._put({"name": "process_name", "ph": "M", "pid": 0, "args": start})
        self._mark_cycles = mark_cycles
        self._cycle_s = 0.0

    def observed(
        self,
        request: Request,
        submitted_s: float,
        agreed_s: float | None,
        done_s: float,
        arrivals: Sequence[tuple[int, float]],
    ) -> None:
        """Write a finished operation to the trace. `arrivals`: (rank, time) of each rank's request."""
        kind = request.kind.upper()
        with self._lock:
            if self._file is None:
                return
            if self._mark_cycles and agreed_s is not None and agreed_s != self._cycle_s:
                self._cycle_s = agreed_s
                self._put({"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": self._us(agreed_s), "s": "g"})
            line = self._line((request.kind, request.name))
            agreed_or_done_s = done_s if agreed_s is None else max(agreed_s, submitted_s)
            self._event(line, f"NEGOTIATE_{kind}", "B", min([submitted_s, *(heard_s for _, heard_s in arrivals)]))
            for rank, heard_s in arrivals:
                place = {"pid": line, "tid": 0, "ts": self._us(heard_s), "dur": 0}
                self._put({"name": str(rank), "ph": "X", **place})
            self._event(line, f"NEGOTIATE_{kind}", "E", agreed_or_done_s)
            if agreed_s is not None:
                self._event(line, kind, "B", agreed_or_done_s)
                self._event(line, kind, "E", done_s)
            # Flush each event, so that no event is lost if the job is killed.
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                # Every record ends with a comma. In JSON another value must follow a comma, so write an empty record.
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def _line(self, key: tuple[str, str]) -> int:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = len(self._lines) + 1
            self._put({"name": "process_name", "ph": "M", "pid": line, "args": {"name": key[1]}})
            self._put({"name": "process_sort_index", "ph": "M", "pid": line, "args": {"sort_index": line}})
        return line

    def _event(self, line: int, name: str, phase: str, time_s: float) -> None:
        self._put({"name": name, "ph": phase, "pid": line, "tid": 0, "ts": self._us(time_s)})

    def _put(self, record: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record) + ",\n")

    def _us(self, time_s: float) -> float:
        return round((time_s - self._start_s) * 1e6, 3)
