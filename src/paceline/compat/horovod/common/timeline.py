"""A trace of the collectives of rank 0, in the format that chrome://tracing and Perfetto read.

Each tensor is a line (`pid`) of its own, as in Horovod's; what is drawn is the time from its submission to its result.
The file is valid after every event: viewers take an array without its closing bracket, and a killed job leaves one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

_lock = threading.Lock()
_trace: _Trace | None = None


def begin(rank: int) -> None:
    """Start the trace that HOROVOD_TIMELINE names, at `init`."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        start(path, rank, mark_cycles=os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def start(path: str, rank: int, *, mark_cycles: bool) -> None:
    """Write a new trace to `path`, on rank 0; the others do nothing.

    mark_cycles: also draw a line at the start of each submission after a result, under the name CYCLE_START.

    Raises:
        ValueError: a trace is being written.
    """
    global _trace
    with _lock:
        if _trace is not None:
            raise ValueError(f"a timeline is being written to {_trace.path}. Call hvd.stop_timeline() first.")
        if rank == 0:
            _trace = _Trace(path, mark_cycles)


def stop() -> None:
    """Close the trace, if there is one."""
    global _trace
    with _lock:
        trace, _trace = _trace, None
    if trace is not None:
        trace.close()


end = stop


def is_on() -> bool:
    return _trace is not None


def note(event: str, name: str, kind: str) -> None:
    """Write that the tensor's collective (ALLREDUCE, ...) begins ("B") or ends ("E")."""
    trace = _trace
    if trace is not None:
        trace.write(event, name, kind)


class _Trace:
    def __init__(self, path: str, mark_cycles: bool) -> None:
        self.path = path
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write("[\n")
        self._lines: dict[str, int] = {}
        self._lock = threading.Lock()
        self._start_ns = time.perf_counter_ns()
        self._mark_cycles = mark_cycles
        self._idle = True

    def write(self, event: str, name: str, kind: str) -> None:
        with self._lock:
            if self._file is None:
                return
            line = self._lines.get(name)
            if line is None:
                line = self._lines[name] = len(self._lines) + 1
                self._put({"name": "process_name", "ph": "M", "pid": line, "args": {"name": name}})
                self._put({"name": "process_sort_index", "ph": "M", "pid": line, "args": {"sort_index": line}})
            if event == "B" and self._idle and self._mark_cycles:
                self._put({"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": self._now_us(), "s": "g"})
            self._idle = event == "E"
            self._put({"name": kind, "ph": event, "pid": line, "tid": 0, "ts": self._now_us()})

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def _put(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record) + ",\n")

    def _now_us(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1000
