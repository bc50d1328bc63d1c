"""Write runs of other trackers to a workspace, each completely and only once.

    read    read and check all values and names of files
    new     fill runs/.new-<id>, then rename it            a kill leaves a hidden folder, which the next import removes
    grown   add files, metrics, notes and the state        each step can be repeated; `import.json` is written last

`import.json` records the values that the last import read. So a later import detects and keeps users' changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, cast

from paceline.errors import FileNameError, PacelineError, UserError
from paceline.runs import artifacts, states, store, tags_and_properties
from paceline.runs.failure import EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder, check_file_name
from paceline.runs.ids import check_experiment_name, plain_experiment_name
from paceline.runs.metrics import MetricLog
from paceline.runs.record import RunRecord, user_name, utc_at
from paceline.runs.removal import NEW
from paceline.system import links, locks
from paceline.system.files import names_in, read_json, write_json
from paceline.trackers.imports.old_run import UNFINISHED, BrokenRun, OldFile, OldRun, Point, Problems

#: Maximum number of characters of a name (of a metric, parameter or tag); maximum number of characters of a text.
_LONGEST_NAME, _LONGEST_TEXT = 500, 100_000
#: Steps must be below this number, because pandas and MLflow store steps as 64-bit integers.
_LARGEST_STEP = 1 << 63
#: Latest valid time in seconds since 1970: the year 3000. A later time counts as an error.
_LAST_S = 32_503_680_000.0
_LOCK_S = 30.0
#: Name of a property of imported runs. Its value names the tracker, and the run's id in the tracker.
ORIGIN = "imported_from"

Outcome = Literal["new", "grown", "unchanged", "broken"]


class ImportedRun(TypedDict):
    """A run in an import's report. run_id: None if unreadable."""

    key: str
    run_id: str | None
    outcome: Outcome
    problems: list[str]


class _Known(TypedDict):
    """The content of `import.json`: the last import of a run.

    values: Number of metric values. digest: Hash of these values. files: Name -> size and modification time.
    """

    tracker: str
    key: str
    values: int
    digest: str
    files: dict[str, list[int]]
    tags: dict[str, str]
    texts: dict[str, str]


@dataclass(frozen=True)
class _Read:
    """A run of another tracker after all its values have been checked."""

    record: RunRecord
    points: list[_Value]
    files: dict[str, OldFile]
    params: dict[str, str]
    known: _Known
    problems: list[str]


@dataclass(frozen=True)
class _Value:
    name: str
    value: float | int | bool | str
    step: int | None
    time_s: float
    kind: str | None


class Adopter:
    """A writer of imported runs into a workspace.

    The caller holds the workspace's import lock.
    """

    def __init__(self, runs_dir: Path, tracker: str, experiment: str | None, *, dry_run: bool = False) -> None:
        self._runs_dir, self._tracker, self._dry_run = runs_dir, tracker, dry_run
        self._experiment = None if experiment is None else check_experiment_name(experiment)
        self._ids: dict[str, str] = {}
        self._listed: dict[Path, dict[str, list[str]]] = {}

    def add(self, old: OldRun | BrokenRun) -> ImportedRun:
        """Import one run. Return its entry in the report, also after an error."""
        if isinstance(old, BrokenRun):
            return ImportedRun(key=old.key, run_id=None, outcome="broken", problems=[old.why])
        try:
            return self._add(old)
        except Exception as error:
            return ImportedRun(
                key=old.key, run_id=None, outcome="broken", problems=[f"{type(error).__name__}: {error}"]
            )

    def _add(self, old: OldRun) -> ImportedRun:
        there = self._find(old.key)
        if there is None and (gone := self._find(old.key, self._runs_dir.parent / "trash")) is not None:
            said = f"{gone.run_id} was deleted; `paceline restore {gone.run_id}` brings it back"
            return ImportedRun(key=old.key, run_id=gone.run_id, outcome="unchanged", problems=[said])
        read = self._read(old, there)
        outcome: Outcome
        if there is None:
            outcome = "new"
            if not self._dry_run:
                self._create(read)
        else:
            outcome = self._grow(there, read)
        return ImportedRun(key=old.key, run_id=read.record.run_id, outcome=outcome, problems=read.problems)

    # --- functions that find the run of an earlier import

    def _find(self, key: str, place: Path | None = None) -> RunFolder | None:
        """Return the run in `place` (default: `runs/`) that was imported from `key`, or None."""
        place = place or self._runs_dir
        for name in self._by_digest(place).get(self._digest(key), ()):
            folder = RunFolder(place / name)
            if tags_and_properties.read(folder.notes).properties.get(ORIGIN) == self._origin(key):
                return folder
        return None

    def _by_digest(self, place: Path) -> dict[str, list[str]]:
        """Return the names of run folders in `place`, by the digest of the imported run's key."""
        if place not in self._listed:
            found = self._listed[place] = dict[str, list[str]]()
            for name in names_in(place):
                if not name.startswith("."):
                    found.setdefault(name.rpartition("_")[2], []).append(name)
        return self._listed[place]

    def _digest(self, key: str) -> str:
        return hashlib.sha256(self._origin(key).encode("utf-8", "surrogatepass")).hexdigest()[:8]

    def _origin(self, key: str) -> str:
        return f"{self._tracker}:{key}"

    def remember(self, old: OldRun) -> None:
        """Choose a run's id before its import, so child runs can refer to it."""
        there = self._find(old.key)
        experiment = self._experiment or plain_experiment_name(old.experiment)
        made = f"{experiment}_{int(_time(old.started_s) or 0)}_{self._digest(old.key)}"
        self._ids[old.key] = there.run_id if there is not None else made

    # --- functions that read the content of a tracker's run

    def _read(self, old: OldRun, there: RunFolder | None) -> _Read:
        problems = old.problems
        points = [value for point in old.points() if (value := _checked(point, problems)) is not None]
        started = _time(old.started_s)
        times = [value.time_s for value in points if value.time_s]
        if started is None:
            started = min(times, default=0.0)
        # If a value has no time, use the start time of the run.
        points = [value if value.time_s else dataclasses.replace(value, time_s=started) for value in points]
        points.sort(key=lambda value: value.time_s)
        ended = max(_time(old.ended_s) or 0.0, max(times, default=started), started)
        digest = hashlib.sha256()
        for value in points:
            digest.update(repr(value).encode("utf-8", "surrogatepass"))
        files = _checked_files(old, problems)
        texts = {"display_name": _text(old.name, problems), "description": _text(old.description, problems)}
        known = _Known(
            tracker=self._tracker,
            key=old.key,
            values=len(points),
            digest=digest.hexdigest(),
            files={name: _stamp(file) for name, file in files.items()},
            tags=_pairs(old.tags, problems),
            texts={field: text for field, text in texts.items() if text and text.strip()},
        )
        parent = self._ids.get(old.parent) if old.parent is not None else None
        if old.parent is not None and parent is None:
            problems.note("left out its parent, which is not in the store", old.parent)
        record = RunRecord(
            run_id=there.run_id if there is not None else self._ids[old.key],
            experiment=(store.experiment(there) if there is not None else None)
            or self._experiment
            or plain_experiment_name(old.experiment),
            kind="interactive",
            parent_run_id=parent,
            created_utc=utc_at(started),
            submitted_by=_text(old.user, problems) or user_name(),
            owner=store.owner(),
            **_end(old, self._tracker, utc_at(started), utc_at(ended)),
        )
        params = {ORIGIN: self._origin(old.key), **_pairs(old.params, problems)}
        return _Read(record, points, files, params, known, problems.sentences())

    # --- methods that write imported runs

    def _create(self, read: _Read) -> None:
        # This import holds the lock of all imports. If this folder exists anyway, a killed import has left it.
        shutil.rmtree(self._runs_dir / f"{NEW}{read.record.run_id}", ignore_errors=True)

        def fill(folder: RunFolder) -> None:
            _put_files(folder, read, {})
            _write_metrics(folder, read.points)
            _write_notes(folder, read, {}, {})
            folder.ballast.unlink()
            write_json(folder.origin, read.known)

        os.close(store.create(self._runs_dir, read.record, fill=fill))
        names = self._by_digest(self._runs_dir).setdefault(self._digest(read.known["key"]), [])
        names.append(read.record.run_id)

    def _grow(self, folder: RunFolder, read: _Read) -> Outcome:
        known = _known(folder)
        record = store.stored(folder)
        has_new_files = any(known["files"].get(name) != stamp for name, stamp in read.known["files"].items())
        is_longer = read.known["digest"] != known["digest"] and read.known["values"] >= known["values"]
        if read.known["values"] < known["values"]:
            read.problems.append(
                f"its store has {read.known['values']} values now, and had {known['values']}: the run keeps them all"
            )
        has_new_state = (read.record.status, read.record.ended_utc) != (record.status, record.ended_utc)
        notes = tags_and_properties.read(folder.notes)
        has_new_notes = (
            any(known["tags"].get(key) != value for key, value in read.known["tags"].items())
            or any(known["texts"].get(key) != value for key, value in read.known["texts"].items())
            or not read.params.keys() <= notes.properties.keys()
        )
        if not (has_new_files or is_longer or has_new_state or has_new_notes):
            return "unchanged"
        if self._dry_run:
            return "grown"
        fd = locks.take_within(folder.lock, _LOCK_S)
        if fd is None:
            raise UserError(f"another process works on run {folder.run_id}. Import again when it has ended.")
        try:
            for top in (folder.outputs, folder.logs):
                for left in top.rglob(".upload-*"):
                    left.unlink()  # a killed import has left this file
            _put_files(folder, read, known["files"])
            if is_longer:
                _write_metrics(folder, read.points)
            _write_notes(folder, read, known["tags"], known["texts"])
            if has_new_state:
                state = read.record
                store.write(folder, record.with_state({**state.state_json(), "owner": record.owner}))
            merged = read.known | {
                "values": max(read.known["values"], known["values"]),
                "digest": read.known["digest"] if is_longer else known["digest"],
                "files": known["files"] | read.known["files"],
            }
            write_json(folder.origin, merged)
        finally:
            os.close(fd)
        return "grown"


def _end(old: OldRun, tracker: str, started_utc: str, ended_utc: str) -> _Ended:
    status = states.FAILED if old.state == UNFINISHED else old.state
    failure = None
    if old.state == UNFINISHED:
        failure = FailureReport(cause="not_completed", message=f"The run had no end in its {tracker} store yet.")
    elif status == states.FAILED:
        failure = FailureReport(cause="user", message=f"The run failed, says its {tracker} store.")
    code = {states.COMPLETED: 0, states.CANCELED: EXIT_CANCELED}.get(status, 1)
    return _Ended(status=status, started_utc=started_utc, ended_utc=ended_utc, failure=failure, exit_code=code)


class _Ended(TypedDict):
    status: str
    started_utc: str
    ended_utc: str
    failure: FailureReport | None
    exit_code: int


def _known(folder: RunFolder) -> _Known:
    """Return a run's `import.json`, with empty values where missing or invalid."""
    empty = _Known(tracker="", key="", values=0, digest="", files={}, tags={}, texts={})
    found = read_json(folder.origin)
    if not isinstance(found, dict):
        return empty
    right = {name: found[name] for name, value in empty.items() if type(found.get(name)) is type(value)}
    return cast("_Known", {**empty, **right})


def _put_files(folder: RunFolder, read: _Read, known: Mapping[str, list[int]]) -> None:
    for name, file in read.files.items():
        if known.get(name) == read.known["files"][name]:
            continue
        try:
            with open(links.open_below(os.fspath(file.top), file.inside), "rb") as source:
                # Remove the copy of an earlier import only after opening the store's file, because the opening may fail.
                if name in known:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(folder.file(name))
                artifacts.put(folder, name, source)
        except (PacelineError, OSError) as error:
            read.known["files"].pop(name)
            read.problems.append(f"file {name!r} could not be copied: {error}")


def _write_metrics(folder: RunFolder, points: list[_Value]) -> None:
    beside = folder.metrics / ".importing.jsonl"
    beside.unlink(missing_ok=True)
    log = MetricLog(beside, of_tracker=True)
    try:
        for value in points:
            if value.kind is None:
                log.scalar(value.name, value.value, value.step, value.time_s)
            else:
                log.other(value.kind, value.name, value.value, value.step, value.time_s)
    finally:
        log.close()
    if points:
        os.replace(beside, folder.metric_log(0))


def _write_notes(folder: RunFolder, read: _Read, tags: Mapping[str, str], texts: Mapping[str, str]) -> None:
    there = tags_and_properties.read(folder.notes)
    new = {key: value for key, value in read.params.items() if key not in there.properties}
    if new:
        tags_and_properties.add_properties(folder.notes, new)
    changed = {key: value for key, value in read.known["tags"].items() if tags.get(key) != value}
    tags_and_properties.set_tags(folder.notes, changed)
    for field, text in read.known["texts"].items():
        if texts.get(field) != text:
            tags_and_properties.set_name(folder.notes, field, text)


def _checked(point: Point, problems: Problems) -> _Value | None:
    name, value = point.name, point.value
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME:
        problems.note(f"left out a value whose name has not 1 to {_LONGEST_NAME} characters", name)
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST_STEP:
        # Metrics can't contain integers of more than 64 bits. A float is exact enough, because charts show fewer digits.
        value = float(value) if abs(value) < 1 << 1023 else math.copysign(math.inf, value)
    if isinstance(value, str):
        value = _text(value, problems)
    if not isinstance(value, (int, float, str)):
        problems.note("left out a value that is neither a number nor a text", name)
        return None
    return _Value(name, value, _step(point.step, problems), _time(point.time_s) or 0.0, point.kind)


def _step(step: object, problems: Problems) -> int | None:
    if step is None:
        return None
    if not isinstance(step, (int, float)) or not math.isfinite(step) or abs(step) >= _LARGEST_STEP:
        problems.note("left out a step that is not a 64-bit number", step)
        return None
    if step != int(step):
        problems.note("rounded a step down to a whole number", step)
    return math.floor(step)


def _time(time_s: object) -> float | None:
    if isinstance(time_s, (int, float)) and 0 < time_s < _LAST_S:
        return float(time_s)
    return None


def _text(value: object, problems: Problems) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) > _LONGEST_TEXT:
        problems.note(f"cut a text after {_LONGEST_TEXT:,} characters", text)
        text = text[:_LONGEST_TEXT]
    # Replace lone surrogates, because UTF-8 can't encode them.
    return text.encode("utf-8", "replace").decode()


def _pairs(values: Mapping[str, object], problems: Problems) -> dict[str, str]:
    found = {}
    for key, value in values.items():
        if not key or len(key) > _LONGEST_NAME:
            problems.note(f"left out a parameter or tag whose name has not 1 to {_LONGEST_NAME} characters", key)
            continue
        found[key] = _text(value, problems) or ""
    return found


def _checked_files(old: OldRun, problems: Problems) -> dict[str, OldFile]:
    found = {}
    for file in old.files():
        try:
            found[check_file_name(file.name)] = file
        except FileNameError:
            problems.note("left out a file whose name leaves the run's folder", file.name)
    return found


def _stamp(file: OldFile) -> list[int]:
    at = os.lstat(file.top / file.inside)
    return [at.st_size, at.st_mtime_ns]
