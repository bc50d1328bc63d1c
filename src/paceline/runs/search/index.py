"""An index of a workspace's runs: each record is read once, and again after a change.

Only the notes (tags, properties, comments) of an ended run can change. So the index checks only the file of the notes.
Each refresh checks the runs that a page shows, and other runs in turns. Facts of 100,000 runs need less than 100 MB.

A file in the user's own state folder caches the facts of ended runs. No other user can change this file, and a shared
workspace gets no file. A missing or broken cache only costs time.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.metric_reader import parsed
from paceline.runs.search.facts import RunFacts, add_notes, read_facts, read_metrics, read_record_facts, stamp_hash
from paceline.runs.search.fields import sorted_runs
from paceline.runs.search.params import packed
from paceline.runs.search.query import predicate
from paceline.runs.search.resources import read_resources
from paceline.runs.search.summaries import MetricSummaries, SummaryReader
from paceline.system.files import PRIVATE, gone_is_fine, replacing, state_folder

_NOTES = RunFolder(Path()).notes.name
#: Seconds after which the index of a workspace on this machine is refreshed.
_FRESH_S = 0.7
#: Pause between refreshes, as a multiple of the last refresh's duration, to spare slow file systems.
_REST = 4.0
#: Maximum number of ended runs whose notes are checked in a refresh, and in a quick refresh. The first refresh checks all.
_TURN, _QUICK_TURN = 5_000, 500
#: Seconds after which the folder of runs is listed again even if it seems unchanged; resolution of file times in seconds.
_LIST_S, _TICK_S = 5.0, 2.0
#: Maximum number of seconds that a refresh waits for busy requests, and the pause between two checks.
_PATIENCE_S, _PAUSE_S = 10.0, 0.01
#: Version of the cache's format, a part of its file name.
_VERSION = 2
_NAMES = [field.name for field in fields(RunFacts)]
_SHARED = ("experiment", "status", "kind", "target", "user", "size", "script", "why")
_MAPPINGS = ("tags", "params", "given", "resources")
#: Rewrite the cache's file if it has more lines than 1.5 times the number of runs, plus this number of lines.
_MOST_STALE = 1000
_PIECE_BYTES, _PIECE_LINES = 1 << 17, 500


class RunIndex:
    """An index of all runs, newest first. Each change of a run increases `version`.

    Args:
        runs_dir: The workspace's folder of runs.
        metrics_s: Seconds after which a refresh stops reading metrics; the next refresh continues. Default: no limit.
        cache: A file with facts of ended runs, which later processes read.
        is_busy: Returns whether a request needs the processor now. If so, a refresh waits for up to 10 seconds in all.
    """

    def __init__(
        self,
        runs_dir: Path,
        *,
        metrics_s: float = math.inf,
        cache: FactsCache | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runs_dir, self._is_busy, self._patience_s = runs_dir, is_busy, 0.0
        self._metrics_s = metrics_s
        self._cache = cache
        self._entries: dict[str, RunFacts] = {}
        self._lock = threading.Lock()
        self._going: threading.Thread | None = None
        self._looked_at = -math.inf
        self._took_s = 0.0
        self._names: int | None = None
        #: Modification time of the runs' folder at its last listing, and the time of this listing.
        self._folder_times = (-1.0, -math.inf)
        #: Ids of runs that are not known to have ended. `_turn`: position in `ids` where the next refresh continues.
        self._open: list[str] = []
        self._turn: int | None = None
        #: Ended runs whose metrics are unread. `_readers`: readers of live runs, beginning with the next run to read.
        self._unread: dict[str, None] = {}
        self._readers: dict[str, SummaryReader] = {}
        #: Complete facts of ended runs that are not yet in the cache.
        self._fresh: dict[str, RunFacts] = {}
        self._listed: tuple[int, list[RunFacts]] = (-1, [])
        self.ids: list[str] = []
        self.version = 0

    def entries(self) -> list[RunFacts]:
        """Return the facts of all runs read so far, newest run first."""
        version, listed = self._listed
        if version != self.version:
            version, known = self.version, self._entries
            listed = [facts for run_id in self.ids if (facts := known.get(run_id)) is not None]
            self._listed = (version, listed)
        return listed

    def get(self, run_id: str) -> RunFacts | None:
        """Return a run's facts; None until its record and metrics have been read."""
        return None if run_id in self._unread else self._entries.get(run_id)

    @property
    def unread(self) -> int:
        """The number of ended runs whose metrics have not been read."""
        return len(self._unread)

    def refresh_within(self, wait_s: float, shown: Iterable[str] = (), *, is_quick: bool = False) -> None:
        """Call `refresh` with these arguments in a thread, and wait at most `wait_s`."""
        if not self._is_due():
            return
        going = self._going
        if going is None or not going.is_alive():
            self._going = going = threading.Thread(target=self._go_on, args=([*shown], is_quick), daemon=True)
            going.start()
        going.join(wait_s)

    def _go_on(self, shown: Iterable[str], is_quick: bool) -> None:
        is_first = self._names is None or bool(self._unread)
        self.refresh(shown, is_quick=is_quick)
        if is_first:
            # Exclude the facts from garbage collection, which would take 0.1 s each time for 100,000 runs.
            gc.freeze()

    def refresh(self, shown: Iterable[str] = (), *, everything: bool = False, is_quick: bool = False) -> None:
        """Read the records of runs that have changed, at most once per interval.

        If another thread is refreshing the index, wait for that refresh.

        Args:
            shown: Ids of ended runs whose notes are read now if changed. Other ended runs are checked in turns.
            everything: Read all changes now, because the caller may have just changed a run.
            is_quick: Check fewer of the other ended runs, and list the runs only if their folder has changed. This is for a
                web page that soon requests another refresh.
        """
        with self._lock:
            if not everything and not self._is_due():
                return
            patience_s = self._patience_s = 0.0 if everything else _PATIENCE_S
            if everything:
                self._turn, self._folder_times = None, (-1.0, -math.inf)
            before = time.monotonic()
            try:
                self._look(shown, is_quick)
                self._read_metrics()
                self._keep()
            finally:
                self._looked_at = time.monotonic()
                self._took_s = self._looked_at - before - (patience_s - self._patience_s)
                self._patience_s = 0.0

    def _give_way(self) -> None:
        """Wait while a request needs the processor, for 10 s per refresh at most."""
        while self._patience_s > 0 and self._is_busy():
            time.sleep(_PAUSE_S)
            self._patience_s -= _PAUSE_S

    def _is_due(self) -> bool:
        rest_s = 0.0 if self._unread else _REST * self._took_s
        return time.monotonic() - self._looked_at >= max(_FRESH_S, rest_s)

    def refresh_notes(self, shown: Iterable[str], wait_s: float) -> None:
        """Read changed tags, names and descriptions of ended runs for up to `wait_s`."""
        until = time.monotonic() + wait_s
        if self._lock.acquire(timeout=wait_s):
            try:
                self._look_at_notes(itertools.takewhile(lambda run_id: time.monotonic() < until, shown))
            finally:
                self._lock.release()

    def _look(self, shown: Iterable[str], is_quick: bool) -> None:
        self._list(math.inf if is_quick else _LIST_S)
        self._open = [run_id for run_id in self._open if not self._has_ended(run_id)]
        turn = _QUICK_TURN if is_quick else _TURN
        start, count = self._turn or 0, len(self.ids) if self._turn is None else turn
        self._turn = start + count if start + count < len(self.ids) else 0
        self._look_at_notes({**dict.fromkeys(shown), **dict.fromkeys(self.ids[start : start + count])})

    def _look_at_notes(self, run_ids: Iterable[str]) -> None:
        runs_dir = os.fspath(self._runs_dir)
        for run_id in run_ids:
            self._give_way()
            known = self._entries.get(run_id)
            if known is None or not known.is_terminal:
                continue
            # Build the path by an f-string, because creating a `Path` object takes longer than the check of the file itself.
            if (notes := stamp_hash(f"{runs_dir}/{run_id}/{_NOTES}")) != known.notes_stamp:
                add_notes(known, RunFolder(self._runs_dir / run_id), notes)
                self.version += 1
                if run_id not in self._unread:
                    self._fresh[run_id] = known

    def _has_ended(self, run_id: str) -> bool:
        """Update a run's facts from its record. Return whether it has ended."""
        self._give_way()
        known = self._entries.get(run_id)
        found = read_record_facts(RunFolder(self._runs_dir / run_id), known)
        if found is None:
            self._forget(run_id)
        elif found != known:
            found.run_id = run_id
            self._entries[run_id] = found
            if found.is_terminal:
                # The run has ended. Read all its logs with a new reader, because the old reader may have missed the last file.
                self._readers.pop(run_id, None)
                self._unread[run_id] = None
            elif known is None:
                self._readers[run_id] = SummaryReader(RunFolder(self._runs_dir / run_id).metrics, self._give_way)
            self.version += 1
        return found is not None and found.is_terminal

    def _list(self, most_s: float) -> None:
        """Read all runs' names if their folder has changed, or after `most_s` seconds."""
        changed = _time_of(self._runs_dir)
        before, listed = self._folder_times
        # Even without a change, list the folder again after a while: file times may be coarse, and NFS clients cache them.
        if changed == before and changed + _TICK_S < listed and time.time() - listed < most_s:
            return
        self._folder_times = changed, time.time()
        names = 0
        # Combine the names' hashes one by one, because a list of the names of 100,000 runs would take 12 MB.
        with contextlib.suppress(OSError), os.scandir(self._runs_dir) as entries:
            for entry in entries:
                names ^= hash(entry.name)
        if names == self._names:
            return
        ids = store.ids(self._runs_dir)
        if self._names is None and self._cache is not None:
            # Set the ids before the slow load, so that pages can show that runs are being read.
            self.ids = ids
            self._entries = self._cache.load(ids, pause=self._give_way)
        if ids is not self.ids:
            there = frozenset(ids)
            for gone in [run_id for run_id in self._entries if run_id not in there]:
                self._forget(gone)
        self._names, self.ids = names, ids
        known = self._entries
        self._open = [run_id for run_id in ids if run_id not in known or not known[run_id].is_terminal]
        self.version += 1

    def _forget(self, run_id: str) -> None:
        self._readers.pop(run_id, None)
        self._unread.pop(run_id, None)
        self._fresh.pop(run_id, None)
        self.version += self._entries.pop(run_id, None) is not None

    def _read_metrics(self) -> None:
        until = time.monotonic() + self._metrics_s
        # Read the metrics of ended runs first, beginning with the newest run. Then read the running runs in turn.
        for run_id in [*self._unread, *self._readers]:
            self._give_way()
            facts, reader = self._entries[run_id], self._readers.pop(run_id, None)
            folder = RunFolder(self._runs_dir / run_id)
            found = read_metrics(folder, facts, reader or SummaryReader(folder.metrics, self._give_way))
            if reader is None:
                facts.resources = packed(read_resources(folder))
            if found != facts.metrics:
                facts.metrics = found
                self.version += 1
            if reader is not None:
                self._readers[run_id] = reader
            else:
                del self._unread[run_id]
                self._fresh[run_id] = facts
                if len(self._fresh) >= _PIECE_LINES:
                    self._keep()
            if time.monotonic() > until:
                break

    def _keep(self) -> None:
        if self._cache is not None and self._fresh:
            self._cache.add(self._fresh.values())
        self._fresh.clear()


def _time_of(directory: Path) -> float:
    try:
        return os.stat(directory).st_mtime
    except OSError:
        return 0.0


def archived_ids(runs: Sequence[RunFacts]) -> set[str]:
    """Return the ids of archived runs, and of their trials and steps.

    Examples:
        >>> archived_ids(runs)
        set()
    """
    found, count = {facts.run_id for facts in runs if facts.is_archived}, 0
    while len(found) > count:
        count = len(found)
        found |= {facts.run_id for facts in runs if facts.parent in found}
    return found


def find_runs(
    runs_dir: Path, where: str = "", sort: str = "", *, children: bool = True, archived: bool | None = None
) -> list[RunFacts]:
    """Return the facts of runs that match a query, newest first or sorted.

    Args:
        runs_dir: The workspace's folder of runs.
        where: A query (`paceline.runs.search.query`); "" for all runs.
        sort: A field (`paceline.runs.search.fields.sorted_runs`).
        children: Include trials of sweeps and steps of pipelines.
        archived: True for archived runs and their children only, False for others only, None for all.

    Raises:
        QueryError: The query or the field is wrong.

    Examples:
        >>> [facts.name for facts in find_runs(workspace.runs_dir, "metrics.acc > 0.9", "metrics.acc.best")]
        ['brave-otter-12']
    """
    matches = predicate(where)
    index = RunIndex(runs_dir, cache=FactsCache(runs_dir))
    index.refresh()
    found = [facts for facts in index.entries() if (children or not facts.is_child) and matches(facts)]
    if archived is not None:
        hidden = archived_ids(index.entries())
        found = [facts for facts in found if (facts.run_id in hidden) == archived]
    return sorted_runs(found, sort) if sort else found


def facts_of(runs_dir: Path, ids: Sequence[str]) -> dict[str, RunFacts]:
    """Return the facts of these runs by id, if their records are readable.

    Examples:
        >>> facts_of(workspace.runs_dir, ["digits_1700000000_00000001"])["digits_1700000000_00000001"].params["lr"]
        0.001
    """
    cache = FactsCache(runs_dir)
    cached, found, fresh = cache.load(ids, compacts=False), {}, []
    for run_id in ids:
        folder, facts = RunFolder(runs_dir / run_id), cached.get(run_id)
        if facts is None:
            facts = read_facts(folder)
            fresh += [facts] if facts is not None and facts.is_terminal else []
        elif (notes := stamp_hash(folder.notes)) != facts.notes_stamp:
            add_notes(facts, folder, notes)
        if facts is not None:
            found[run_id] = facts
    if fresh:
        cache.add(fresh)
    return found


class FactsCache:
    """A file with the facts of a workspace's ended runs."""

    def __init__(self, runs_dir: Path) -> None:
        # Use no cache for a user without a home folder: nothing can be created below /dev/null.
        base = (state if (state := state_folder()).is_absolute() else Path(os.devnull)) / "runs"
        self.path = (
            base / f"{hashlib.sha256(os.fsencode(os.path.realpath(runs_dir))).hexdigest()[:24]}.{_VERSION}.jsonl"
        )

    def load(
        self, ids: Iterable[str], *, compacts: bool = True, pause: Callable[[], None] = lambda: None
    ) -> dict[str, RunFacts]:
        """Return the cached facts of these runs by id.

        compacts: Whether to remove obsolete lines if there are many. pause: Called before each line.
        """
        found: dict[str, RunFacts] = {}
        lines = 0
        # Use the caller's id objects as keys, to save memory.
        known = {run_id: run_id for run_id in ids}
        for row in self._rows():
            pause()
            lines += 1
            # Decode only the lines of the runs in `ids`, because these may be few of the runs in the file.
            facts = _facts(row) if isinstance(row, list) and row and str(row[0]) in known else None
            if facts is not None:
                facts.run_id = known[facts.run_id]
                found[facts.run_id] = facts
        if compacts and lines > len(found) + len(found) // 2 + _MOST_STALE:
            with gone_is_fine(), replacing(self.path) as beside, open(beside, "xb", opener=_private) as file:
                file.write(_lines(found.values()))
        return found

    def add(self, facts: Iterable[RunFacts]) -> None:
        """Append facts of ended runs, which replace earlier facts of the runs."""
        with gone_is_fine():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
            with open(fd, "wb", buffering=0) as file:
                # Begin with a newline, in case a full disk has cut the last line short.
                file.write(b"\n" + _lines(facts))

    def _rows(self) -> Iterator[object]:
        """Yield each line's JSON value, unless another user can change the file."""
        with gone_is_fine(), open(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
                # Read the file in pieces, because the file for 100,000 runs has 50 MB.
                while data := file.read(_PIECE_BYTES):
                    yield from parsed(data + file.readline())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)


def _lines(facts: Iterable[RunFacts]) -> bytes:
    return b"".join(json.dumps(_row(one), separators=(",", ":")).encode() + b"\n" for one in facts)


def _row(facts: RunFacts) -> list[object]:
    values: dict[str, object] = {name: getattr(facts, name) for name in _NAMES}
    values |= {name: dict(getattr(facts, name)) for name in _MAPPINGS}
    values["metrics"] = [facts.metrics.to_json(), facts.metrics.goals]
    # To save space, store None for the command-line parameters (`given`) if they equal `params`, as in most runs.
    values["given"] = values["given"] if values["given"] != values["params"] else None
    return list(values.values())


def _facts(row: object) -> RunFacts | None:
    try:
        # Skip a line with wrong types. No check for malicious data is needed, because only this user can write the file.
        values: dict[str, Any] = dict(zip(_NAMES, cast("list[Any]", row), strict=True))
        values |= {name: sys.intern(values[name]) for name in _SHARED}
        values |= {name: packed(values[name]) for name in _MAPPINGS if values[name] is not None}
        values["given"] = values["given"] or values["params"]
        values["metrics"] = MetricSummaries.of(*values["metrics"])
        return RunFacts(**values)
    except (TypeError, ValueError, AttributeError, struct.error):
        return None
