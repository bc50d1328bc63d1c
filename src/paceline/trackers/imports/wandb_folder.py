"""Read W&B's local folders without the package `wandb`.

    wandb/run-<time>-<id>/run-<id>.wandb             or offline-run-...; a resumed run has several folders
                         /files/...                  saved files, media, output.log

The log is a LevelDB log of serialized Records (https://github.com/google/leveldb/blob/main/doc/log_format.md)
with a header of 7 bytes.

    block      32 KiB of frames; no frame crosses its end, and fewer than 7 bytes at the end are padding
    frame      CRC-32 of type and data: 4 bytes | size: 2 | type: 1 | data            little-endian; the CRC is zlib's
    type       1: a whole record; 2, 3, 4: the first, a middle or the last frame of a longer record

https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto

An import leaves out the links that `wandb.save` makes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from paceline.errors import UserError
from paceline.runs import states
from paceline.system.serialization import flat
from paceline.trackers.event_file import fields
from paceline.trackers.imports.old_run import UNFINISHED, BrokenRun, OldFile, OldRun, Point, Problems, files_below

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK_BYTES = 1 << 15
_FRAME = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4
#: Field numbers in W&B's message Record. Each Record has one of these fields.
HISTORY, SUMMARY, CONFIG, RUN, EXIT = 2, 3, 5, 17, 18
_MEDIA = "_type"


def runs(path: Path) -> Iterator[OldRun | BrokenRun]:
    """Yield the runs of the folder `wandb`, its parent, or one run's folder."""
    places = [place for place in (path, path / "wandb", path / ".wandb") if place.is_dir()]
    patterns = ("*.wandb", "run-*/*.wandb", "offline-run-*/*.wandb")
    logs = [log for place in places for pattern in patterns for log in place.glob(pattern)]
    # Sort logs by time: the name of a log's folder begins with the start time.
    logs.sort(key=lambda log: log.parent.name.removeprefix("offline-"))
    if not logs:
        raise UserError(f"{str(path)!r} is no W&B folder: it has no run-*/run-*.wandb. Name the folder `wandb`.")
    parts: dict[str, list[tuple[Path, _Meta]]] = {}
    for log in logs:
        meta = _Meta()
        try:
            if log.is_symlink():
                raise ValueError("it is a link")
            for number, data in records(log, meta.problems.note):
                meta.add(number, data)
        except Exception as error:
            yield BrokenRun(log.parent.name, f"{log.name} can't be read: {error}")
            continue
        if not meta.run_id:
            yield BrokenRun(log.parent.name, f"{log.name} has no run in it; W&B was ended before it wrote one")
        else:
            parts.setdefault(f"{meta.project}/{meta.run_id}", []).append((log, meta))
    for key, segments in parts.items():
        yield _joined(key, segments)


class _Meta:
    """A run's name, configuration, state and so on, without its history."""

    def __init__(self) -> None:
        self.run_id = self.project = self.name = self.notes = self.group = self.job_type = self.sweep = ""
        self.tags: list[str] = []
        self.config: dict[str, object] = {}
        self.summary: dict[str, object] = {}
        self.started_s: float | None = None
        self.runtime_s = 0
        self.exit_code: int | None = None
        self.problems = Problems()

    def add(self, number: int, data: bytes) -> None:
        if number == RUN:
            self._add_run(data)
        elif number == CONFIG:
            self._update(self.config, data)
        elif number == SUMMARY:
            self._update(self.summary, data)
        elif number == EXIT:
            found = dict(fields(data))
            code, runtime = found.get(1, 0), found.get(2, 0)
            self.exit_code = code if isinstance(code, int) else 1
            self.runtime_s = runtime if isinstance(runtime, int) else 0

    def _add_run(self, data: bytes) -> None:
        texts = {1: "run_id", 3: "project", 6: "group", 7: "job_type", 8: "name", 9: "notes", 12: "sweep"}
        for number, value in fields(data):
            if not isinstance(value, bytes):
                continue
            if number in texts:
                setattr(self, texts[number], value.decode("utf-8", "replace"))
            elif number == 10:
                self.tags.append(value.decode("utf-8", "replace"))
            elif number == 4:
                self._update(self.config, value)
            elif number == 17:
                found = dict(fields(value))
                seconds, nanos = found.get(1, 0), found.get(2, 0)
                if isinstance(seconds, int) and isinstance(nanos, int):
                    self.started_s = seconds + nanos / 1e9

    def _update(self, values: dict[str, object], data: bytes) -> None:
        for number, item in fields(data):
            if number == 1 and isinstance(item, bytes) and (found := _item(item)) is not None:
                _put(values, *found)


def _joined(key: str, segments: list[tuple[Path, _Meta]]) -> OldRun:
    """Combine a resumed run's folders into one run. segments: (log, metadata) per folder."""
    last = segments[-1][1]
    problems = Problems()
    for _, meta in segments:
        for text in meta.problems:
            problems.note(text, meta.run_id)
    config = {name: value for _, meta in segments for name, value in _leaves(meta.config)}
    ends = [(meta.started_s or 0.0) + meta.runtime_s for _, meta in segments]
    state = UNFINISHED
    if last.exit_code is not None:
        state = states.FAILED if last.exit_code else states.COMPLETED

    def points() -> Iterator[Point]:
        seen: set[str] = set()
        latest = None
        for log, _ in segments:
            for number, data in records(log):
                if number == HISTORY:
                    for point in _of_history(data, problems):
                        seen.add(str(point.name))
                        latest = point.time_s
                        yield point
        # Add values that the script has written only into W&B's summary of the run, but not into the run's history.
        for name, value in _leaves(last.summary):
            if name not in seen and not name.startswith("_") and isinstance(value, (int, float)):
                yield Point(name, value, None, latest)

    def files() -> Iterable[OldFile]:
        for log, _ in segments:
            for file in files_below(log.parent / "files", "outputs", problems):
                yield file._replace(name="logs/output.log") if file.inside == "output.log" else file

    words = {"group": last.group, "job_type": last.job_type, "sweep": last.sweep}
    return OldRun(
        key=key,
        experiment=last.project or "wandb",
        name=last.name or None,
        description=last.notes or None,
        state=state,
        started_s=segments[0][1].started_s,
        ended_s=max(ends),
        params={name: value for name, value in config.items() if not name.startswith("_")},
        tags={**dict.fromkeys(last.tags, ""), **{name: value for name, value in words.items() if value}},
        points=points,
        files=files,
        problems=problems,
    )


def _of_history(data: bytes, problems: Problems) -> Iterator[Point]:
    values: dict[str, object] = {}
    step: object = None
    for number, item in fields(data):
        if number == 1 and isinstance(item, bytes) and (found := _item(item)) is not None:
            _put(values, *found)
        elif number == 2 and isinstance(item, bytes):
            step = dict(fields(item)).get(1, 0)
    time_s = values.get("_timestamp")
    step = values.get("_step", step)
    for name, value in _leaves(values):
        if name.startswith("_"):
            continue
        if not isinstance(value, Mapping):
            yield Point(name, value, step, time_s)
        elif pictures := _pictures(value):
            yield from (Point(name, f"outputs/{picture}", step, time_s, "image") for picture in pictures)
        else:
            problems.note(f"kept only the file of a {str(value.get(_MEDIA))[:40]}", name)


def _pictures(value: Mapping[str, object]) -> list[str]:
    if value.get(_MEDIA) == "image-file":
        return [path] if isinstance(path := value.get("path"), str) else []
    names = value.get("filenames")
    if value.get(_MEDIA) == "images/separated" and isinstance(names, list):
        return [name for name in names if isinstance(name, str)]
    return []


def _leaves(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return flat(values, is_whole=lambda value: not value or _MEDIA in value)


def _item(data: bytes) -> tuple[list[str], object] | None:
    """Return a serialized W&B item's nested keys and value; None if invalid."""
    path: list[str] = []
    value: object = None
    for number, content in fields(data):
        if not isinstance(content, bytes):
            continue
        if number in (1, 2):
            path.append(content.decode("utf-8", "replace"))
        elif number == 16:
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                return None
    return (path, value) if path else None


def _put(values: dict[str, object], path: list[str], value: object) -> None:
    for part in path[:-1]:
        inner = values.get(part)
        if not isinstance(inner, dict):
            inner = values[part] = {}
        values = inner
    values[path[-1]] = value


def records(path: Path, note: Callable[[str], object] = str) -> Iterator[tuple[int, bytes]]:
    """Yield (field number, content) of each record. Report a damaged end to `note`.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is not a W&B log.
    """
    with open(path, "rb") as file:
        block = file.read(_BLOCK_BYTES)
        if not block.startswith(HEADER[:4]):
            raise ValueError("it has no header of W&B")
        at, parts = len(HEADER), list[bytes]()
        while block:
            while at + _FRAME.size <= len(block):
                checksum, size, kind = _FRAME.unpack_from(block, at)
                data = block[at + _FRAME.size : at + _FRAME.size + size]
                if kind == 0 and size == 0:
                    break  # the rest of this block is padding
                if len(data) < size or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
                    note("left out the rest of its log after a torn or damaged record")
                    return
                at += _FRAME.size + size
                parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
                if kind in (_FULL, _LAST):
                    yield from _content(b"".join(parts))
            block, at = file.read(_BLOCK_BYTES), 0


def _content(record: bytes) -> Iterator[tuple[int, bytes]]:
    found = ((number, value) for number, value in fields(record) if isinstance(value, bytes))
    yield from (pair for pair in found if pair[0] in (HISTORY, SUMMARY, CONFIG, RUN, EXIT))
