"""The registry of dataset versions on disk.

    <workspace>/datasets/<name>/<version>.json          the dataset
    <workspace>/datasets/<name>/<version>.files.json    its files at registration
    <workspace>/datasets/<name>/<version>.frozen.json   the names and hashes of its frozen files (module `freeze`)
    <workspace>/datasets/<name>/.last                   the highest version ever used
    <workspace>/datasets/.lock                          held while a version is written

A version number is never reused, so "digits:3" in a run's record always means the same data.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.data.datasets.steps import Reading, Steps, steps_from_json
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.system.files import read_json, write_json
from paceline.system.names import did_you_mean, name_rule
from paceline.system.registry import Versions

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo


_NAME = name_rule("_. -", 200, last="_-")

Then: TypeAlias = "Mapping[tuple[str | None, str], tuple[int, str]]"
#: Name of a frozen file -> its size and SHA-256.
FrozenFiles: TypeAlias = "Mapping[str, tuple[int, str]]"

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """A registered version of a dataset.

    Attributes:
        kind: "file" or "tabular".
        reading: How to read the files, such as {"format": "parquet"}; None for files without partition_format.
        fingerprint, file_count, size_bytes: Content hash, number and total size of the files at registration.
        frozen: Folder of the frozen copies, which runs read instead of the files; None if not frozen.
        frozen_fingerprint: Content hash of the frozen copies; "" if not frozen.
    """

    name: str
    kind: str
    sources: tuple[Source, ...]
    fingerprint: str
    reading: Reading | None = None
    steps: Steps = ()
    version: int = 0
    id: str = ""
    description: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    created_utc: str = ""
    file_count: int = 0
    size_bytes: int = 0
    frozen: Source | None = None
    frozen_fingerprint: str = ""

    @property
    def definition(self) -> tuple[object, ...]:
        """The fields that decide whether two records describe the same data."""
        return self.kind, self.sources, self.reading, self.steps, self.fingerprint

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DatasetRecord:
        """Create the record of a dataset version from its JSON form."""
        sources = tuple(Source(**source) for source in data["sources"])
        frozen = Source(**data["frozen"]) if data.get("frozen") else None
        return cls(**{**data, "sources": sources, "steps": steps_from_json(data.get("steps")), "frozen": frozen})


def check_dataset_name(name: object) -> str:
    """Return a dataset's name, or raise DataError if it breaks the naming rule."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DataError(
            f"the dataset name {name!r}: give letters, digits, '_', '-', '.' and spaces within, at most 200, beginning with a "
            "letter or a digit."
        )
    return name


def add(
    workspace_dir: Path, record: DatasetRecord, files: Sequence[FileInfo], *, create_new_version: bool
) -> DatasetRecord:
    """Register a dataset, and return the record with its version.

    If create_new_version is False and the latest version has the same data, return the latest version, with the new
    description and tags. Concurrent calls that add a version get different version numbers.

    Raises:
        DataError: Another dataset has this name and create_new_version is False, or the disk can't be written.
    """
    registry, name = _registry(workspace_dir), check_dataset_name(record.name)
    listed = [[info.datastore, info.path, info.size, info.version] for info in files]
    made = replace(
        record,
        id=str(uuid.uuid4()),
        created_utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        file_count=len(files),
        # Count -1 as 0: a store that does not report a size gives -1.
        size_bytes=sum(max(info.size, 0) for info in files),
    )

    def document(version: int) -> dict[str, object]:
        # Write the list of files before the version's own file: that file makes the version visible, and readers need the list.
        write_json(_files_path(registry, name, version), listed, sync=True)
        return asdict(replace(made, version=version))

    try:
        with registry.locked():
            # Hold the lock until the version is written: concurrent calls must not see the same latest version.
            known = registry.versions(name)
            if known and not create_new_version:
                return _same_or_refuse(workspace_dir, record, known)
            return replace(made, version=registry.add(name, document))
    except OSError as error:
        raise DataError(
            f"dataset {name!r} can't be written to {str(registry.of(name).folder)!r}: {error.strerror}."
        ) from error


def load(workspace_dir: Path, name: str, version: int | str = "latest") -> DatasetRecord:
    """Return a registered version of a dataset.

    Args:
        workspace_dir: Folder of the workspace.
        name: Name of the dataset.
        version: Version number, or "latest".

    Raises:
        DataError: The dataset or version does not exist; the message lists the names or versions that exist.
    """
    registry = _registry(workspace_dir)
    known = registry.versions(check_dataset_name(name))
    if not known:
        there = ", ".join(map(repr, registry.names())) or "none at all"
        raise DataError(
            f"there is no dataset {name!r} in the workspace {str(workspace_dir)!r}.{did_you_mean(name, registry.names())} There "
            f"are: {there}. Register one with dataset.register(workspace, name)."
        )
    number = known[-1] if version == "latest" else _number(version)
    if number not in known:
        raise DataError(
            f"dataset {name!r} has no version {version!r}. It has: {', '.join(map(str, known))}; or give 'latest'."
        )
    try:
        return DatasetRecord.from_json(registry.read(name, number))
    except (TypeError, KeyError) as error:
        path = registry.of(name).path(str(number))
        raise DataError(f"{str(path)!r} can't be read as a dataset; a newer Paceline may have written it.") from error


def load_id(workspace_dir: Path, dataset_id: str) -> DatasetRecord:
    """Return the registered dataset version with this id, or raise DataError."""
    for name in names(workspace_dir):
        for version in versions(workspace_dir, name):
            record = load(workspace_dir, name, version)
            if record.id == dataset_id:
                return record
    raise DataError(f"there is no dataset with the id {dataset_id!r} in the workspace {str(workspace_dir)!r}.")


def files_then(workspace_dir: Path, name: str, version: int) -> dict[tuple[str | None, str], tuple[int, str]]:
    """Return a dataset version's files at registration: (datastore, path) -> (size, content hash).

    Raises:
        DataError: The version's file list is missing.
    """
    path = _files_path(_registry(workspace_dir), name, version)
    data = read_json(path)
    if not isinstance(data, list):
        raise DataError(
            f"{str(path)!r}, the copy of the files of dataset '{name}:{version}', is missing. Register the dataset again."
        )
    return {(datastore, where): (size, stamp) for datastore, where, size, stamp in data}


def frozen_files(workspace_dir: Path, name: str, version: int) -> FrozenFiles:
    """Return the frozen files of a dataset version, as name -> (size, SHA-256).

    Raises:
        DataError: The version's file list is missing.
    """
    path = _frozen_path(_registry(workspace_dir), name, version)
    data = read_json(path)
    if not isinstance(data, dict):
        raise DataError(f"{str(path)!r}, the list of the frozen files of dataset '{name}:{version}', is missing.")
    return {file: (size, sha256) for file, (size, sha256) in data.items()}


def keep_frozen(workspace_dir: Path, record: DatasetRecord, content: FrozenFiles) -> DatasetRecord:
    """Record a dataset version's frozen folder and `content`: {name: (size, SHA-256)}."""
    registry = _registry(workspace_dir)
    with registry.locked():
        # Load the record again, because another process may have changed its description and tags.
        changed = replace(
            load(workspace_dir, record.name, record.version),
            frozen=record.frozen,
            frozen_fingerprint=record.frozen_fingerprint,
        )
        write_json(_frozen_path(registry, record.name, record.version), content, sync=True)
        registry.of(record.name).put(str(record.version), asdict(changed))
    return changed


def names(workspace_dir: Path) -> list[str]:
    """Return the names of the registered datasets, sorted."""
    return _registry(workspace_dir).names()


def versions(workspace_dir: Path, name: str) -> list[int]:
    """Return the version numbers of a dataset, ascending."""
    return _registry(workspace_dir).versions(name)


def remove(workspace_dir: Path, name: str) -> None:
    """Remove all versions of a dataset's name, but no data files."""
    registry = _registry(workspace_dir)
    with registry.locked():
        registry.remove(check_dataset_name(name))


def describe(
    workspace_dir: Path, name: str, version: int, description: str | None, tags: Mapping[str, str]
) -> DatasetRecord:
    """Change a dataset version's tags, and its description unless None. Return its record.

    Raises:
        DataError: The version does not exist.
    """
    registry = _registry(workspace_dir)
    with registry.locked():
        dataset = load(workspace_dir, name, version)
        changed = replace(
            dataset, tags=dict(tags), description=dataset.description if description is None else description
        )
        registry.of(name).put(str(version), asdict(changed))
    return changed


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
    # Description and tags of a version may change, its data never does.
    if (description, tags) != (latest.description, latest.tags):
        latest = replace(latest, description=description, tags=tags)
        _registry(workspace_dir).of(record.name).put(str(latest.version), asdict(latest))
    return latest


def _registry(workspace_dir: Path) -> Versions:
    return Versions(workspace_dir / "datasets", _NAME)


def _files_path(registry: Versions, name: str, version: int) -> Path:
    return registry.of(name).folder / f"{version}.files.json"


def _frozen_path(registry: Versions, name: str, version: int) -> Path:
    return registry.of(name).folder / f"{version}.frozen.json"


def _number(version: object) -> int:
    # `int` alone would accept " 3 ", "+3" and digits that are not ASCII.
    text = str(version)
    return int(text) if text.isascii() and text.isdecimal() else -1


@dataclass(frozen=True, kw_only=True)
class ContentCheck:
    """A comparison of a dataset's current and registered files, true if equal."""

    dataset: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.added or self.removed or self.changed)

    def __str__(self) -> str:
        if self:
            return f"dataset {self.dataset!r} has the content that was registered"
        parts = [
            f"{len(paths)} {what} ({', '.join(map(repr, paths[:_SHOWN]))}{', ...' if len(paths) > _SHOWN else ''})"
            for what, paths in (("added", self.added), ("removed", self.removed), ("changed", self.changed))
            if paths
        ]
        return f"dataset {self.dataset!r} no longer has the content that was registered: {'; '.join(parts)}"


def compare(dataset: str, then: Then, now: Sequence[FileInfo]) -> ContentCheck:
    """Compare a dataset's current files with its files at registration.

    Args:
        dataset: Name of the dataset, for messages.
        then: The files at registration, as (datastore, path) -> (size, content hash).
        now: The current files with their content hashes, as `with_content` returns them.
    """
    there = {(info.datastore, info.path): (info.size, info.version) for info in now}
    return ContentCheck(
        dataset=dataset,
        added=_paths(there.keys() - then.keys()),
        removed=_paths(then.keys() - there.keys()),
        changed=_paths({key for key in then.keys() & there.keys() if tuple(then[key]) != there[key]}),
    )


def _paths(keys: set[tuple[str | None, str]]) -> tuple[str, ...]:
    return tuple(sorted(path for _, path in keys))
