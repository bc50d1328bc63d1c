"""Registered datasets on disk: one file for each version, never changed in what it says of the data.

    <workspace>/datasets/<name>/<version>.json          what the dataset is
    <workspace>/datasets/<name>/<version>.files.json    its files when it was registered
    <workspace>/datasets/<name>/.last                   the highest version that ever was
    <workspace>/datasets/.lock                          held while one is written

A version's number is never given out twice: a run that says "digits:3" must not come to mean other data.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.datasets.steps import Steps, steps_from_json
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.system import locks
from paceline.system.files import read_json, write_json

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_. -]{0,198}[A-Za-z0-9_-])?")
_VERSION = re.compile(r"([1-9][0-9]*)\.json")


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """A registered version. kind: "file" or "tabular". reading: how a table's files are read ("format", and its options).

    fingerprint: of the files when it was registered; file_count, size_bytes: how many they were, and how large.
    """

    name: str
    kind: str
    sources: tuple[Source, ...]
    fingerprint: str
    reading: Mapping[str, Any] | None = None
    steps: Steps = ()
    version: int = 0
    id: str = ""
    description: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    created_utc: str = ""
    file_count: int = 0
    size_bytes: int = 0

    @property
    def definition(self) -> tuple[Any, ...]:
        """Equal for the same data, taken in the same way."""
        return self.kind, self.sources, self.reading, self.steps, self.fingerprint

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DatasetRecord:
        """The record that `write` left."""
        sources = tuple(Source(**source) for source in data["sources"])
        return cls(**{**data, "sources": sources, "steps": steps_from_json(data.get("steps"))})


def check_dataset_name(name: Any) -> str:
    """The same name.

    Raises:
        DataError: not letters, digits, `_`, `-`, `.` and spaces within, 200 at most, beginning with a letter or digit.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DataError(
            f"the dataset name {name!r}: give letters, digits, '_', '-', '.' and spaces within, at most 200, beginning with a "
            "letter or a digit."
        )
    return name


def datasets_dir(workspace_dir: Path) -> Path:
    return workspace_dir / "datasets"


def add(
    workspace_dir: Path, record: DatasetRecord, files: Sequence[FileInfo], *, create_new_version: bool
) -> DatasetRecord:
    """The version under which the data is registered: the latest one if that is the same data, else a new one.

    Two processes at once get two versions.

    Raises:
        DataError: there is another dataset of that name and no new version was asked for, or it can't be written.
    """
    folder = datasets_dir(workspace_dir) / check_dataset_name(record.name)
    try:
        with _locked(workspace_dir):
            known = versions(workspace_dir, record.name)
            if known and not create_new_version:
                return _same_or_refuse(workspace_dir, record, known)
            folder.mkdir(exist_ok=True)
            last = read_json(folder / ".last")
            version = max([last if isinstance(last, int) else 0, *known]) + 1
            made = replace(
                record,
                version=version,
                id=str(uuid.uuid4()),
                created_utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                file_count=len(files),
                size_bytes=sum(max(info.size, 0) for info in files),
            )
            # The version is there once its own file is, which comes last.
            write_json(folder / ".last", version)
            listed = [[info.datastore, info.path, info.size, info.version] for info in files]
            write_json(folder / f"{version}.files.json", listed, sync=True)
            _write(folder, made)
            return made
    except OSError as error:
        raise DataError(f"dataset {record.name!r} can't be written to {str(folder)!r}: {error.strerror}.") from error


def load(workspace_dir: Path, name: str, version: int | str = "latest") -> DatasetRecord:
    """A registered version. version: its number, or "latest".

    Raises:
        DataError: no such name or version; those that there are are named.
    """
    known = versions(workspace_dir, check_dataset_name(name))
    if not known:
        there = ", ".join(map(repr, names(workspace_dir))) or "none at all"
        raise DataError(
            f"there is no dataset {name!r} in the workspace {str(workspace_dir)!r}. There are: {there}. "
            "Register one with dataset.register(workspace, name)."
        )
    number = known[-1] if version == "latest" else _number(version)
    if number not in known:
        raise DataError(
            f"dataset {name!r} has no version {version!r}. It has: {', '.join(map(str, known))}; or give 'latest'."
        )
    path = datasets_dir(workspace_dir) / name / f"{number}.json"
    data = read_json(path)
    try:
        return DatasetRecord.from_json(data)
    except (TypeError, KeyError) as error:
        raise DataError(f"{str(path)!r} can't be read as a dataset; a newer Paceline may have written it.") from error


def load_id(workspace_dir: Path, dataset_id: str) -> DatasetRecord:
    """The registered version with this id.

    Raises:
        DataError: there is none.
    """
    for name in names(workspace_dir):
        for version in versions(workspace_dir, name):
            record = load(workspace_dir, name, version)
            if record.id == dataset_id:
                return record
    raise DataError(f"there is no dataset with the id {dataset_id!r} in the workspace {str(workspace_dir)!r}.")


def files_then(workspace_dir: Path, name: str, version: int) -> dict[tuple[str | None, str], tuple[int, str]]:
    """(datastore, path) -> (size, version) of the files when this version was registered.

    Raises:
        DataError: the listing is gone.
    """
    path = datasets_dir(workspace_dir) / name / f"{version}.files.json"
    data = read_json(path)
    if not isinstance(data, list):
        raise DataError(
            f"{str(path)!r}, the files of dataset '{name}:{version}' as they were, is not there to be read."
        )
    return {(datastore, where): (size, stamp) for datastore, where, size, stamp in data}


def names(workspace_dir: Path) -> list[str]:
    """The names that have a version, sorted."""
    try:
        found = sorted(os.listdir(datasets_dir(workspace_dir)))
    except OSError:
        return []
    return [name for name in found if _NAME.fullmatch(name) and versions(workspace_dir, name)]


def versions(workspace_dir: Path, name: str) -> list[int]:
    """The versions of this name, ascending; empty where there is none."""
    try:
        found = os.listdir(datasets_dir(workspace_dir) / name)
    except OSError:
        return []
    return sorted(int(match[1]) for entry in found if (match := _VERSION.fullmatch(entry)))


def remove(workspace_dir: Path, name: str) -> None:
    """Forget all versions; the files that they name stay where they are, and the versions' numbers are not used again."""
    folder = datasets_dir(workspace_dir) / check_dataset_name(name)
    with _locked(workspace_dir):
        for version in versions(workspace_dir, name):
            (folder / f"{version}.json").unlink(missing_ok=True)
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name != ".last":
                entry.unlink() if not entry.is_dir() else shutil.rmtree(entry)


def _same_or_refuse(workspace_dir: Path, record: DatasetRecord, known: Sequence[int]) -> DatasetRecord:
    latest = load(workspace_dir, record.name, known[-1])
    if latest.definition != record.definition:
        what = "taken in another way" if latest.fingerprint == record.fingerprint else "of other data"
        raise DataError(
            f"there is a dataset {record.name!r} already, and its version {latest.version} is {what}. Register with "
            f"create_new_version=True for version {latest.version + 1}, or give another name."
        )
    description = record.description if record.description is not None else latest.description
    tags = {**latest.tags, **record.tags}
    if (description, tags) != (latest.description, latest.tags):
        latest = replace(latest, description=description, tags=tags)
        _write(datasets_dir(workspace_dir) / record.name, latest)
    return latest


def _write(folder: Path, record: DatasetRecord) -> None:
    write_json(folder / f"{record.version}.json", asdict(record), sync=True)


def _number(version: Any) -> int:
    text = str(version)
    return int(text) if text.isascii() and text.isdigit() else -1


@contextlib.contextmanager
def _locked(workspace_dir: Path) -> Iterator[None]:
    folder = datasets_dir(workspace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with locks.locked(folder / ".lock"):
        yield
