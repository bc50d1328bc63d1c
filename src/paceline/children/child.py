"""A child's record, looked at once or again and again; and whether a child ever began."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import PacelineError, RunNotFoundError
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.logs import LineAssembler, Tail
from paceline.runs.record import RunRecord
from paceline.system.files import read_json

#: How often a record that has not changed is read all the same, to see that somebody still looks after the child.
_RECORD_S = 1.0

_PAUSE_S = 0.1


class RecordWatch:
    """Reads a record where it has changed."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = str(folder.record)
        self._stamp: tuple[int, int] | None = None
        self._read_at = time.monotonic()

    def changed(self) -> Mapping[str, Any] | None:
        """State and times of the record, where it may be another one than at the last look."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        # The inode as well: a record is replaced by a rename, and two writes may fall into one tick of the file system's clock.
        stamp, now = (found.st_mtime_ns, found.st_ino), time.monotonic()
        if now - self._read_at >= _RECORD_S:
            self._stamp, self._read_at = stamp, now
            with contextlib.suppress(PacelineError, OSError):
                # Looks whether somebody still cares for the child, and asks an engine.
                record = read.record(self._folder)
                return {"status": record.status, "started_utc": record.started_utc, "ended_utc": record.ended_utc}
        elif stamp != self._stamp:
            self._stamp = stamp
            told = read_json(self._folder.record)
            return told if isinstance(told, dict) and told.get("status") in states.ALL else None
        return None


def record_of(folder: RunFolder) -> RunRecord | None:
    """A child's record as it is now; None where there is no such child."""
    if not folder.record.exists():
        return None
    try:
        return read.record(folder)
    except RunNotFoundError:
        # It was removed between the two looks.
        return None


def never_began(record: RunRecord) -> bool:
    """Whether a child was made, and its submission ended there: no process of it has ever run."""
    return not record.attempts and record.failure is not None and record.failure.cause in ("not_started", "reboot")


def follow_log(folder: RunFolder, line: Callable[[str], None]) -> RunRecord:
    """Call `line` for each line of the controller's log from its start, until the run has ended; the final record."""
    tail, lines = Tail(folder.driver_log), LineAssembler()
    try:
        while True:
            # The record first: what is said before the end is there once the end is seen.
            record = read.record(folder)
            for data in tail.read():
                for text in lines.feed(data):
                    line(text)
            if record.is_terminal:
                return record
            time.sleep(_PAUSE_S)
    finally:
        tail.close()
