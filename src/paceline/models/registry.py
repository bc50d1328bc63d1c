"""The registry of models on disk. Versions are added and removed atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, ModelNotFoundError
from paceline.models import aliases, keep, staging
from paceline.models.formats import format_of, framework_of
from paceline.models.names import NAME, ModelReference, check_model_name, parse
from paceline.models.record import DOCUMENT, FILES, Lineage, ModelFile, ModelRecord, TrainingData, digest_of
from paceline.models.sources import ModelSource
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import user_name, utc_now
from paceline.runs.tags_and_properties import Notes
from paceline.system.files import remove_tree
from paceline.system.names import did_you_mean, some
from paceline.system.registry import VersionFolders

#: Maximum number of names that an error message lists.
_MAX_LISTED = 10


def workspace_dir_of(workspace: object) -> Path:
    """Return the folder of a workspace, or raise ModelError for another object."""
    path = getattr(workspace, "path", None)
    if not isinstance(path, (str, os.PathLike)):
        raise ModelError(f"{workspace!r} is not a workspace. Give Workspace.from_config(), or Workspace(folder).")
    return Path(path)


def models_dir(workspace_dir: Path) -> Path:
    """Return the folder of all models of a workspace."""
    return workspace_dir / "models"


def blobs_dir(workspace_dir: Path) -> Path:
    """Return the folder of model files, which are named by content hash."""
    return models_dir(workspace_dir) / ".blobs"


def parts_dir(workspace_dir: Path) -> Path:
    """Return the folder of unfinished registrations and removals of models."""
    return models_dir(workspace_dir) / ".parts"


def versions_of(workspace_dir: Path) -> VersionFolders:
    """Return the object that manages the folders of model versions."""
    return VersionFolders(models_dir(workspace_dir), NAME, DOCUMENT)


def files_dir(workspace_dir: Path, record: ModelRecord) -> Path:
    """Return the folder of a model version's files."""
    return versions_of(workspace_dir).path(record.name, record.version) / FILES


def notes_path(workspace_dir: Path, record: ModelRecord) -> Path:
    """Return the file of a model version's tags, properties and description."""
    return versions_of(workspace_dir).path(record.name, record.version) / "notes.jsonl"


def add(
    workspace_dir: Path,
    name: str,
    source: ModelSource,
    *,
    run: Lineage | None = None,
    datasets: Sequence[TrainingData] = (),
    framework: str | None = None,
    framework_version: str | None = None,
    tags: Mapping[str, object] | None = None,
    properties: Mapping[str, object] | None = None,
    description: str | None = None,
    on_read: Callable[[int], object] = lambda size: None,
) -> ModelRecord:
    """Register files as the next version of a model, and return its record.

    By default, framework and version are detected from the files and the run. on_read: Called with the number of bytes read.

    Raises:
        ModelError: The name is invalid, a file can't be read or keeps changing, or the disk is full. No version is added.
    """
    check_model_name(name)
    versions, parts = versions_of(workspace_dir), parts_dir(workspace_dir)
    _check_outside(source, workspace_dir)
    staging.sweep(parts)
    try:
        with staging.staged(parts) as folder:
            files = tuple(_kept(workspace_dir, source, folder, on_read))
            seen = framework_of(folder, files, run or Lineage())
            made = ModelRecord(
                name=name,
                top=source.top,
                is_folder=source.is_folder,
                files=files,
                digest=digest_of(files),
                framework=framework or seen[0],
                framework_version=framework_version or (seen[1] if framework in (None, seen[0]) else None),
                run=run or Lineage(),
                datasets=tuple(datasets),
                created_utc=utc_now(),
                registered_by=user_name(),
            )
            notes = folder.parent / "notes.jsonl"
            tags_and_properties.set_tags(notes, tags or {})
            write_properties(notes, properties or {})
            if description is not None:
                tags_and_properties.set_name(notes, "description", description)
            with versions.locked():
                version = versions.add_folder(
                    name, staging.ready(folder), lambda number: replace(made, version=number).to_json()
                )
    except OSError as error:
        raise ModelError(f"model {name!r} can't be registered: {_why(error)}") from error
    return replace(made, version=version)


def add_pulled(workspace_dir: Path, record: ModelRecord, folder: Path) -> None:
    """Turn a folder of downloaded files into the version that `record` describes.

    Raises:
        ModelError: A different model of this name and version exists already, or the version can't be written.
    """
    versions = versions_of(workspace_dir)
    try:
        with versions.locked():
            versions.put_folder(record.name, record.version, staging.ready(folder), record.to_json())
    except FileExistsError:
        if load(workspace_dir, record.name, record.version).digest != record.digest:
            raise ModelError(f"somebody has registered another {record.id} meanwhile.") from None
    except OSError as error:
        raise ModelError(f"model {record.id} can't be kept: {_why(error)}") from error


def write_properties(notes: Path, properties: Mapping[str, object]) -> None:
    """Write the properties of a model version that is being registered."""
    if properties:
        tags_and_properties.add_properties(notes, properties)
        notes.with_name("notes.lock").unlink()


def load(workspace_dir: Path, name: str, version: int | None = None) -> ModelRecord:
    """Return the record of a model version. Without `version`: of the latest version.

    Raises:
        ModelNotFoundError: The version does not exist; the message lists the existing versions.
        ModelError: The record can't be read.
    """
    versions = versions_of(workspace_dir)
    known = versions.versions(check_model_name(name))
    if not known:
        raise ModelNotFoundError(
            f"there is no model {name!r} in the workspace {str(workspace_dir)!r}.{did_you_mean(name, versions.names())} There "
            f"are: {listed(versions.names())}. `paceline model register {name} PATH` makes the first version."
        )
    number = known[-1] if version is None else version
    if number not in known:
        raise ModelNotFoundError(f"model {name!r} has no version {number}. It has: {listed(known)}.")
    try:
        return ModelRecord.from_json(versions.read(name, number))
    except (TypeError, KeyError) as error:
        path = versions.path(name, number) / DOCUMENT
        raise ModelError(f"{str(path)!r} can't be read as a model; a newer Paceline may have written it.") from error


def records(workspace_dir: Path, name: str | None = None) -> Iterator[ModelRecord]:
    """Yield model versions' readable records, sorted by name, the latest version first."""
    versions = versions_of(workspace_dir)
    for each in versions.names() if name is None else [check_model_name(name)]:
        for version in reversed(versions.versions(each)):
            with contextlib.suppress(ModelError):
                yield load(workspace_dir, each, version)


def ids_of_run(folder: RunFolder) -> list[str]:
    """Return the references of the model versions that a run made, such as "digits:3"."""
    return [record.id for record in records(folder.path.parent.parent) if record.run_id == folder.run_id]


def notes_of(workspace_dir: Path, record: ModelRecord) -> Notes:
    """Return a model version's tags, properties and description."""
    return tags_and_properties.read(notes_path(workspace_dir, record))


def remove(workspace_dir: Path, record: ModelRecord) -> int:
    """Remove a model version, and return the freed bytes.

    Raises:
        ModelError: An alias points at the version, or the version can't be removed.
    """
    versions, parts = versions_of(workspace_dir), parts_dir(workspace_dir)
    gone = parts / f"{staging.GONE}{secrets.token_hex(8)}"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        with versions.locked():
            pointing = [alias for alias, to in aliases.current(versions, record.name).items() if to == record.version]
            if pointing:
                raise ModelError(
                    f"{record.id} is {' and '.join(map(repr, pointing))}. Move the alias first: paceline model alias "
                    f"{record.name} {pointing[0]} VERSION, or remove it: --remove."
                )
            versions.take_away(record.name, record.version, gone)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise ModelNotFoundError(f"model {record.id} was removed meanwhile.") from None
        raise ModelError(f"{record.id} can't be removed: {_why(error)}") from error
    with contextlib.suppress(OSError):
        remove_tree(gone)
    blobs = blobs_dir(workspace_dir)
    contents = {(file.size_bytes, file.sha256) for file in record.files}
    return sum(keep.drop(keep.blob_path(blobs, size, sha256)) for size, sha256 in contents)


def _kept(
    workspace_dir: Path, source: ModelSource, folder: Path, on_read: Callable[[int], object]
) -> Iterator[ModelFile]:
    for file in source.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = keep.keep(file, blobs_dir(workspace_dir), target, on_read)
        yield ModelFile(
            name=file.name, size_bytes=kept.size_bytes, sha256=kept.sha256, format=format_of(target, file.name)
        )


def _check_outside(source: ModelSource, workspace_dir: Path) -> None:
    models = os.path.realpath(models_dir(workspace_dir))
    for file in source.files:
        if file.top is None and f"{os.path.realpath(file.path)}".startswith(f"{models}{os.sep}.parts{os.sep}"):
            raise ModelError(f"{source.label!r} holds the workspace itself. Name the folder that has the model alone.")


def listed(found: Sequence[object]) -> str:
    """Return a text with the first items and the number of further items, or "none"."""
    return some([*map(str, found)], _MAX_LISTED) or "none"


def _why(error: OSError) -> str:
    place = error.filename2 or error.filename
    return f"{error.strerror or error}{f': {str(place)!r}' if place else ''}."


def resolve(workspace_dir: Path, reference: str | ModelReference) -> ModelRecord:
    """Return the record for a reference such as "digits", "digits:3" or "digits@production".

    Raises:
        ModelError: The text is not a reference.
        ModelNotFoundError: The model, version or alias does not exist. The message lists the alternatives.
    """
    meant = reference if isinstance(reference, ModelReference) else parse(reference)
    if meant.alias is None:
        return load(workspace_dir, meant.name, meant.version)
    versions = versions_of(workspace_dir)
    there = aliases.current(versions, meant.name)
    if meant.alias not in there:
        load(workspace_dir, meant.name)  # raises if no model has this name
        raise ModelNotFoundError(
            f"model {meant.name!r} has no alias {meant.alias!r}.{did_you_mean(meant.alias, there)} It has: "
            f"{', '.join(there) or 'none'}. `paceline model alias {meant.name} {meant.alias} VERSION` sets it."
        )
    return load(workspace_dir, meant.name, there[meant.alias])


def matches(notes: Notes, tags: Any, properties: Mapping[str, object] | None) -> bool:
    """Return whether a model version has these tags and properties.

    `tags`: A name, {name: value}, or a list of names and of (name, value) pairs. The tag of a name alone may have any value.
    """
    wanted = [tags] if isinstance(tags, str) else [*tags.items()] if isinstance(tags, Mapping) else [*(tags or ())]
    for tag in wanted:
        if isinstance(tag, str):
            if tag not in notes.tags:
                return False
        else:
            key, value = tag
            if key not in notes.tags or notes.tags[key] != (None if value is None else str(value)):
                return False
    return all(notes.properties.get(key) == str(value) for key, value in (properties or {}).items())
