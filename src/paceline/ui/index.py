"""An index of a workspace's runs: each record is read once, and again after a change.

A final record never changes, so of an ended run only the notes are checked. An entry is small: ten thousand need some ten
megabytes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.runs import read, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import is_trial
from paceline.runs.record import duration_s
from paceline.system.files import stamp_of

_Stamp = tuple[int, int, int] | None
_NOTES = RunFolder(Path()).notes.name
#: Seconds after which the index of a workspace on this machine is refreshed.
_FRESH_S = 0.7
#: Pause between refreshes, as a multiple of the last refresh's duration, to spare slow file systems.
_REST = 4.0


@dataclass(slots=True)
class IndexEntry:
    """A run's row in the list of runs. size: "2x4". why: reason for waiting or failing."""

    run_id: str
    experiment: str
    status: str
    kind: str
    name: str
    target: str
    user: str
    created_utc: str
    started_utc: str | None
    ended_utc: str | None
    size: str
    attempts: int
    why: str
    parent: str | None
    tags: Mapping[str, str | None] = field(default_factory=dict)
    is_archived: bool = False
    record_stamp: _Stamp = None
    notes_stamp: _Stamp = None

    @property
    def is_terminal(self) -> bool:
        return self.status in states.TERMINAL

    @property
    def duration_s(self) -> float | None:
        return duration_s(self.started_utc, self.ended_utc)

    @property
    def title(self) -> str:
        return self.name or self.run_id


class Index:
    """An index of all runs, newest first. `version` increases with each change of a run."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._entries: dict[str, IndexEntry] = {}
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._took_s = 0.0
        self.ids: list[str] = []
        self.version = 0

    def entries(self) -> list[IndexEntry]:
        """Return the entries of the last refresh, or those that the first has read so far."""
        known = self._entries
        return [known[run_id] for run_id in self.ids if run_id in known]

    def refresh(self) -> None:
        """Read the records that have changed, at most once per interval.

        Concurrent callers wait for the same refresh.
        """
        if time.monotonic() - self._looked_at < max(_FRESH_S, _REST * self._took_s):
            return
        with self._lock:
            before = time.monotonic()
            if before - self._looked_at < max(_FRESH_S, _REST * self._took_s):
                return
            try:
                self._look()
            finally:
                self._looked_at = time.monotonic()
                self._took_s = self._looked_at - before

    def _look(self) -> None:
        ids = store.ids(self._runs_dir)
        if ids != self.ids:
            for gone in set(self.ids) - set(ids):
                self._entries.pop(gone, None)
            self.ids = ids
            self.version += 1
        runs_dir = os.fspath(self._runs_dir)
        # Sort the entries, newest first.
        for run_id in ids:
            known = self._entries.get(run_id)
            if known is not None and known.is_terminal:
                # Almost every run ends here without a change. Creating a `Path` would take longer than this check.
                notes = stamp_of(f"{runs_dir}/{run_id}/{_NOTES}")
                if notes != known.notes_stamp:
                    _read_notes(known, RunFolder(self._runs_dir / run_id), notes)
                    self.version += 1
                continue
            found = _entry(RunFolder(self._runs_dir / run_id), known)
            if found is None:
                if self._entries.pop(run_id, None) is not None:
                    self.version += 1
            elif found != known:
                self._entries[run_id] = found
                self.version += 1


def _entry(folder: RunFolder, known: IndexEntry | None) -> IndexEntry | None:
    """Return the present entry of a run, or `known` itself if the run is unchanged."""
    record_stamp, notes = stamp_of(folder.state), stamp_of(folder.notes)
    try:
        # Read the record as other readers see it: a run whose supervisor has died has ended.
        entry = _of(read.raw(folder) or {}, record_stamp)
    # The run was removed, or its record is unreadable.
    except (PacelineError, OSError, TypeError, ValueError, AttributeError, KeyError):
        return None
    if known is not None and known.notes_stamp == notes:
        entry.name, entry.tags, entry.notes_stamp = known.name, known.tags, notes
        entry.is_archived = known.is_archived
    else:
        _read_notes(entry, folder, notes)
    return entry


def _of(data: Mapping[str, Any], stamp: _Stamp) -> IndexEntry:
    job = data.get("job") or {}
    failure = data.get("failure") or {}
    hang = data.get("hang") if data.get("status") == states.RUNNING else None
    hangs = f"hangs since {str(hang.get('since_utc'))[:19]}: {hang.get('text')}" if isinstance(hang, dict) else ""
    return IndexEntry(
        run_id=str(data["run_id"]),
        experiment=sys.intern(str(data.get("experiment") or "")),
        status=sys.intern(str(data.get("status") or "")),
        kind=sys.intern(str(data.get("kind") or "script")),
        name="",
        target=sys.intern(str(data.get("target") or "")),
        user=sys.intern(str(data.get("submitted_by") or "")),
        created_utc=str(data.get("created_utc") or ""),
        started_utc=data.get("started_utc"),
        ended_utc=data.get("ended_utc"),
        size=sys.intern(f"{_nodes(job)}×{job['process_count_per_node']}" if job else ""),
        attempts=len(data.get("attempts") or ()),
        why=str(failure.get("message") or data.get("waiting_for") or hangs)[:300],
        parent=data.get("parent_run_id"),
        record_stamp=stamp,
    )


def _nodes(job: Mapping[str, Any]) -> str:
    return "..".join(map(str, job.get("node_range") or [job["node_count"]]))


def _read_notes(entry: IndexEntry, folder: RunFolder, stamp: _Stamp) -> None:
    entry.notes_stamp = stamp
    if stamp is None:
        entry.name, entry.tags, entry.is_archived = "", {}, False
        return
    noted = tags_and_properties.read(folder.notes)
    entry.name = str(noted.name or "")
    entry.is_archived = noted.is_archived
    entry.tags = {sys.intern(key): value for key, value in noted.tags.items()}


# --- queries of the list

#: Column -> key by which the list is sorted. Runs without a value come last.
SORTS: dict[str, Callable[[IndexEntry], Any]] = {
    "run": lambda entry: entry.title.lower(),
    "state": lambda entry: entry.status,
    "experiment": lambda entry: entry.experiment.lower(),
    "target": lambda entry: entry.target,
    "user": lambda entry: entry.user,
    "took": lambda entry: entry.duration_s,
}
#: Name of the filter that selects runs that have not ended.
LIVE = "live"


@dataclass(frozen=True)
class RunQuery:
    """The filters and the sort order of a list of runs.

    text: part of name, id, tags or experiment. state: one of `states.ALL`, or "live". sort: a key of `SORTS`, with "-" for
    descending; "" for newest first. parent: only children of this run. archived: only archived runs, else only others.
    """

    text: str = ""
    experiment: str = ""
    state: str = ""
    target: str = ""
    user: str = ""
    tags: tuple[str, ...] = ()
    trials: bool = False
    parent: str = ""
    archived: bool = False
    sort: str = ""
    page: int = 1

    @property
    def is_filtered(self) -> bool:
        return bool(self.text or self.experiment or self.state or self.target or self.user or self.tags or self.parent)


def selected(entries: Iterable[IndexEntry], query: RunQuery) -> list[IndexEntry]:
    """Return the entries that pass all filters, in the query's order."""
    words = query.text.lower().split()
    tags = [word.partition("=") for word in query.tags]
    passing = [entry for entry in entries if _passes(entry, query, words, tags)]
    by = SORTS.get(query.sort.lstrip("-"))
    if by is not None:
        known = [entry for entry in passing if by(entry) not in (None, "")]
        unknown = [entry for entry in passing if by(entry) in (None, "")]
        passing = sorted(known, key=by, reverse=query.sort.startswith("-")) + unknown
    elif query.sort == "created":
        passing.reverse()
    return passing


def _passes(entry: IndexEntry, query: RunQuery, words: list[str], tags: list[tuple[str, str, str]]) -> bool:
    if entry.is_archived != query.archived:
        return False
    if query.parent:
        if entry.parent != query.parent:
            return False
    elif not query.trials and is_trial(entry.run_id):
        return False
    if query.experiment and entry.experiment != query.experiment:
        return False
    if query.state and entry.status != query.state and not (query.state == LIVE and not entry.is_terminal):
        return False
    if query.target and entry.target != query.target:
        return False
    if query.user and entry.user != query.user:
        return False
    for key, equals, value in tags:
        if key not in entry.tags or (equals and value and entry.tags[key] != value):
            return False
    if words:
        text = f"{entry.name} {entry.run_id} {entry.experiment} {entry.user} " + " ".join(
            f"{key}={value or ''}" for key, value in entry.tags.items()
        )
        text = text.lower()
        return all(word in text for word in words)
    return True
