"""Read a child run for its controller: its record, its log, and whether an attempt has begun."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypedDict

from paceline.errors import PacelineError, RunNotFoundError
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.logs import LineAssembler, Tail
from paceline.runs.record import RunRecord
from paceline.system.files import read_json, stamp_of

#: After this many seconds, read a child run's record even if its file is unchanged, to detect its supervisor's death.
_RECORD_S = 1.0
_LOG_S = 0.1


class ChildState(TypedDict):
    """The fields of a child run's record that a sweep or pipeline needs."""

    status: str
    started_utc: str | None
    ended_utc: str | None


class RecordWatch:
    """A reader of a child run's record, which skips an unchanged file."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = str(folder.state)
        self._stamp: tuple[int, int, int] | None = None
        self._read_at = time.monotonic()

    def changed(self) -> ChildState | None:
        """Return the child run's state if it may have changed since the last call."""
        stamp, now = stamp_of(self._path), time.monotonic()
        if stamp is None:
            return None
        if now - self._read_at >= _RECORD_S:
            self._stamp, self._read_at = stamp, now
            with contextlib.suppress(PacelineError, OSError):
                # `record` also checks whether the supervisor is alive, and asks a remote engine for the child's state.
                record = read.record(self._folder)
                return {"status": record.status, "started_utc": record.started_utc, "ended_utc": record.ended_utc}
        elif stamp != self._stamp:
            self._stamp = stamp
            data = read_json(self._folder.state)
            if isinstance(data, dict) and data.get("status") in states.ALL:
                return {
                    "status": data["status"],
                    "started_utc": data.get("started_utc"),
                    "ended_utc": data.get("ended_utc"),
                }
        return None


def record_of(folder: RunFolder) -> RunRecord | None:
    """Return a child run's current record, or None if the run was removed."""
    if not folder.state.exists():
        return None
    try:
        return read.record(folder)
    except RunNotFoundError:
        return None  # the child was removed after the check above


def never_began(record: RunRecord) -> bool:
    """Return whether a failed start or a reboot ended a run before any attempt."""
    return not record.attempts and record.failure is not None and record.failure.cause in ("not_started", "reboot")


def is_cut_off(folder: RunFolder) -> bool:
    """Return whether a run failed because its submission was interrupted, not canceled."""
    with contextlib.suppress(PacelineError):
        return not folder.cancel_request.exists() and never_began(store.stored(folder))
    return False


def follow_log(folder: RunFolder, line: Callable[[str], None]) -> RunRecord:
    """Call `line` with each log line until the run ends. Return the run's record."""
    tail, lines = Tail(folder.driver_log), LineAssembler()
    try:
        while True:
            # Read the record before the log: if the record says that the child has ended, the log is then complete.
            record = read.record(folder)
            for data in tail.read():
                for text in lines.feed(data):
                    line(text)
            if record.is_terminal:
                return record
            time.sleep(_LOG_S)
    finally:
        tail.close()
