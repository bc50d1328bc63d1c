"""Occurrences of a schedule: times, versions and ended runs, each of which starts at most one run.

    <folder>/open/<key>.json     an occurrence that waits, or whose run is active
    <folder>/done/<key>.json     an occurrence that is over; renamed from `open`

A process claims an occurrence by creating its file, which fails if the file exists. So even after a kill, no occurrence
starts two runs. The file also records the progress of the run's start.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.system.files import names_in
from paceline.system.registry import Documents
from paceline.system.serialization import fits, known_fields

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,250}")
#: Maximum number of ended occurrences of planned times to keep for `paceline schedule show`. Occurrences of new versions and
#: ended runs are never removed: their files show that the version or run has already started a run.
KEPT = 200

WAITING, STARTED, SKIPPED, MISSED, FAILED = "waiting", "started", "skipped", "missed", "failed"
TIME, DATASET, MODEL, RUN, HAND = "time", "dataset", "model", "run", "hand"


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """A time, a version or an ended run that starts a schedule's run.

    Attributes:
        kind: "time", "dataset", "model", "run", or "hand" for `paceline schedule run`.
        what: The time in UTC, "name:version", or the id of the run that has ended.
        status: "waiting", "started", "skipped", "missed" or "failed".
        run_id: The run that the occurrence starts. The id is set shortly before the submission.
        run_status: The state in which the run `run_id` ended.
        reason: Why the occurrence is skipped, has failed, or waits.
        is_late: Whether the occurrence was found over five minutes after its time, since the machine or its timer was off.
        missed_count: Number of earlier times that start no run of their own, from `missed_first` to `missed_last`.
    """

    key: str
    kind: str
    what: str
    time_utc: str
    status: str = WAITING
    run_id: str | None = None
    run_status: str | None = None
    reason: str = ""
    is_late: bool = False
    missed_count: int = 0
    missed_first: str | None = None
    missed_last: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Occurrences:
    """The occurrences of one schedule, in files below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._open = Documents(folder / "open", _KEY)
        self._done = Documents(folder / "done", _KEY)

    def keys(self, kind: str) -> set[str]:
        """Return the keys (file names) of all claimed occurrences of this kind."""
        return {key for key in (*self._open.names(), *self._done.names()) if key.startswith(f"{kind}-")}

    def claim(self, occurrence: Occurrence) -> bool:
        """Claim an occurrence for this process. Return False if another process has claimed it."""
        key = occurrence.key
        if self._done.path(key).exists():
            return False
        try:
            self._open.add(key, occurrence.to_json())
        except FileExistsError:
            return False
        # Another process may have finished the occurrence since the check above.
        if self._done.path(key).exists():
            self._open.remove(key)
            return False
        return True

    def keep(self, occurrence: Occurrence) -> None:
        """Store the new state of an occurrence that is not over."""
        self._open.put(occurrence.key, occurrence.to_json())

    def finish(self, occurrence: Occurrence) -> None:
        """Store the final state of an occurrence."""
        self.keep(occurrence)
        self._done.folder.mkdir(exist_ok=True)
        os.replace(self._open.path(occurrence.key), self._done.path(occurrence.key))

    def open(self) -> list[Occurrence]:
        """Return the occurrences that are not over, oldest first."""
        return _read(self._open, self._open.names())

    def latest(self, count: int) -> list[Occurrence]:
        """Return up to `count` occurrences, newest first."""
        found = [*_read(self._done, self._done.names()), *self.open()]
        return sorted(found, key=_age, reverse=True)[:count]

    def prune(self) -> None:
        """Remove all but the newest occurrences of times, and unfinished temporary files.

        The caller holds the lock.
        """
        times = [key for key in self._done.names() if key.startswith(f"{TIME}-")]
        for key in times[:-KEPT]:
            self._done.remove(key)
        for folder in (self._open.folder, self._done.folder):
            for name in names_in(folder):
                if name.startswith("."):
                    (folder / name).unlink(missing_ok=True)


def _read(documents: Documents, keys: list[str]) -> list[Occurrence]:
    found = [_of_json(documents.read(key)) for key in keys]
    return sorted((one for one in found if one is not None), key=_age)


def _age(occurrence: Occurrence) -> tuple[str, str]:
    return occurrence.time_utc, occurrence.key


def _of_json(data: Any) -> Occurrence | None:
    try:
        return Occurrence(**known_fields(Occurrence, data)) if fits(data, Occurrence) else None
    except TypeError:
        return None
