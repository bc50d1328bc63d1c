"""Push model versions to a datastore and pull them, verified and resumable.

    <path>/.blobs/<sha256>                   each content once
    <path>/<name>/<version>/model.json       the record, which is written last and makes the version visible

A version has the same content in the workspace and in the datastore: `digits:3` never means two models. Files are
stored by content, so after a killed push, the next push uploads only missing files.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.data.stores.filesystem import Store
from paceline.data.stores.names import check_relative, check_tree
from paceline.data.transfer.blobs import SHA256, Blobs, found_below, opened, parse_place
from paceline.data.transfer.listing import path_in_store
from paceline.data.transfer.progress import Progress
from paceline.data.transfer.upload import put_new, read_bytes
from paceline.errors import ModelChangedError, ModelError, ModelNotFoundError, TransferError
from paceline.job.data_reference import Source
from paceline.models import check, keep, registry, staging
from paceline.models.names import NAME
from paceline.models.record import DOCUMENT, ModelRecord, digest_of
from paceline.models.sources import ModelSourceFile
from paceline.runs import tags_and_properties
from paceline.system.names import did_you_mean

#: Folder of the models in a datastore, unless a path is given.
DEFAULT_PATH = "models"


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The result of a push. stored, stored_bytes: number and size of new files."""

    place: str
    stored: int
    stored_bytes: int
    is_new: bool


def place(text: str) -> Source:
    """Parse STORE, STORE:PATH, URL or absolute path of models, or raise ModelError."""
    found = parse_place(text, DEFAULT_PATH)
    if found is None:
        raise ModelError(f"{text!r} is not a place of models. Write STORE, STORE:PATH or a URL, as s3://bucket/models.")
    return found


def push(
    workspace_dir: Path, record: ModelRecord, to: Source, progress: Progress | None = None, *, verify: bool = False
) -> Pushed:
    """Store a model version in a datastore. Return the number and size of new files.

    Args:
        workspace_dir: Folder of the workspace.
        record: The version.
        to: The destination.
        progress: Called with (bytes done, total bytes, files done, total files).
        verify: Read every stored byte, and store again files that have changed.

    Raises:
        ModelError: The datastore has a different model of this name and version.
        ModelChangedError: The version's files have changed.
        DataError, TransferError: The store can't be written.
    """
    folder = registry.files_dir(workspace_dir, record)
    check.refuse(record, check.changes(folder, record))
    with opened(workspace_dir, to) as (store, path):
        document = f"{path}{record.name}/{record.version}/{DOCUMENT}"
        there = read_bytes(store, document)
        if there is not None:
            _check_same(record, there, store)
        blobs = Blobs(store, to, f"{path}.blobs")
        wanted = {
            file.sha256: file for file in record.files if not blobs.has(file.sha256, file.size_bytes, verify=verify)
        }
        blobs.put([(sha256, folder / one.name) for sha256, one in sorted(wanted.items())], progress)
        blobs.refresh()
        # Check only the files that were just stored: `wanted` left out files that were already checked in the store.
        if short := [one.name for one in wanted.values() if not blobs.has(one.sha256, one.size_bytes, verify=verify)]:
            raise TransferError(f"{short[0]!r} of model {record.id} is not whole in {store.title}. Push again.")
        notes = registry.notes_of(workspace_dir, record)
        content = {**record.to_json(), "notes": asdict(notes)}
        is_new = there is None and put_new(store, json.dumps(content).encode() + b"\n", document)
        if not is_new:
            # Another process may have stored a record at the same time: check that both records are the same.
            _check_same(record, read_bytes(store, document) or b"", store)
        return Pushed(
            place=to.path if to.datastore is None else f"{to.datastore}:{to.path}",
            stored=len(wanted),
            stored_bytes=sum(file.size_bytes for file in wanted.values()),
            is_new=is_new,
        )


def pull(
    workspace_dir: Path, place_of_models: Source, name: str, version: int, progress: Progress | None = None
) -> ModelRecord:
    """Fetch and register a datastore's model version, and return its record.

    Raises:
        ModelNotFoundError: The datastore does not have the version; the message lists its versions.
        ModelError: The workspace has a different model of this name and version, or the stored record is invalid.
        ModelChangedError: A stored file has changed.
        DataError, TransferError: The store can't be read.
    """
    with opened(workspace_dir, place_of_models) as (store, path):
        content = read_bytes(store, f"{path}{name}/{version}/{DOCUMENT}")
        if content is None:
            known = [f"{model}:{number}" for model, number in listed(workspace_dir, place_of_models)]
            raise ModelNotFoundError(
                f"there is no model {name}:{version} in {store.title}.{did_you_mean(f'{name}:{version}', known)} "
                f"There are: {registry.listed(known)}."
            )
        record, notes = _read(content, store)
        if (record.name, record.version) != (name, version):
            raise ModelError(f"{name}:{version} in {store.title} says that it is {record.id}.")
        with contextlib.suppress(ModelNotFoundError):
            here = registry.load(workspace_dir, name, version)
            if here.digest != record.digest:
                raise ModelError(
                    f"there is another model {record.id} here: registered {here.created_utc} by {here.registered_by}. "
                    "Pull into another workspace, or register what you have under another name."
                )
            return here
        staging.sweep(registry.parts_dir(workspace_dir))
        with staging.staged(registry.parts_dir(workspace_dir)) as folder:
            _fetch(store, place_of_models, path, record, workspace_dir, folder, progress)
            _write_notes(folder.parent / "notes.jsonl", notes)
            registry.add_pulled(workspace_dir, record, folder)
        return record


def listed(workspace_dir: Path, place_of_models: Source) -> list[tuple[str, int]]:
    """Return the sorted (name, version) of all model versions in a datastore.

    Raises:
        DataError, TransferError: The store can't be read.
    """
    models = []
    with opened(workspace_dir, place_of_models) as (store, path):
        for info in found_below(store, place_of_models, path):
            parts = path_in_store(info).removeprefix(path).split("/")
            if len(parts) == 3 and parts[2] == DOCUMENT and NAME.fullmatch(parts[0]) and parts[1].isdecimal():
                models.append((parts[0], int(parts[1])))
    return sorted(models)


def _check_same(record: ModelRecord, content: bytes, store: Store) -> None:
    there, _ = _read(content, store)
    if there.digest != record.digest:
        raise ModelError(
            f"there is another model {record.id} in {store.title}: registered {there.created_utc} by {there.registered_by}, "
            f"digest {there.digest[:12]} and not {record.digest[:12]}. Register this one under another name, or push it to "
            "another path."
        )


def _read(content: bytes, store: Store) -> tuple[ModelRecord, dict[str, dict[str, object]]]:
    """Check a stored model.json. Return its record, and notes such as tags."""
    try:
        data = json.loads(content)
        record = ModelRecord.from_json(data)
        for file in record.files:
            check_relative(file.name, store.title)
            if (
                not SHA256.fullmatch(file.sha256)
                or type(file.size_bytes) is not int
                or file.size_bytes < 0
                or file.name.partition("/")[0] != record.top
            ):
                raise ValueError(file.name)
        check_tree([file.name for file in record.files], store.title)
        if record.digest != digest_of(record.files) or not record.files:
            raise ValueError("digest")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{store.title} has no valid model record, or one of a newer Paceline: {error}.") from error
    notes = data.get("notes")
    return record, notes if isinstance(notes, dict) else {}


def _fetch(
    store: Store,
    source: Source,
    path: str,
    record: ModelRecord,
    workspace_dir: Path,
    folder: Path,
    progress: Progress | None,
) -> None:
    blobs, fetched = registry.blobs_dir(workspace_dir), registry.parts_dir(workspace_dir) / "pulled"
    stored = Blobs(store, source, f"{path}.blobs")
    missing = []
    for file in record.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if keep.take(blobs, file.size_bytes, file.sha256, target):
            continue
        if not stored.has(file.sha256, file.size_bytes):
            raise ModelChangedError(f"file {file.name!r} of model {record.id} is not whole in {store.title}.")
        missing.append(file)
    if missing:
        fetched.mkdir(parents=True, exist_ok=True)
    stored.fetch({file.sha256: file.size_bytes for file in missing}, fetched, progress)
    for file in missing:
        fetched_file = ModelSourceFile(name=file.name, path=fetched / file.sha256)
        if keep.keep(fetched_file, blobs, folder / file.name).sha256 != file.sha256:
            fetched_file.path.unlink(missing_ok=True)
            raise ModelChangedError(
                f"file {file.name!r} of model {record.id} in {store.title} has another content than the registered one. In the "
                f"workspace of its registration, `paceline model push {record.id} ... --verify` stores it again."
            )
    for file in missing:
        (fetched / file.sha256).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        fetched.rmdir()  # the folder is not empty while another process pulls


def _write_notes(path: Path, notes: dict[str, dict[str, object]]) -> None:
    tags_and_properties.set_tags(path, notes.get("tags") or {})
    registry.write_properties(path, notes.get("properties") or {})
    if notes.get("description") is not None:
        tags_and_properties.set_name(path, "description", str(notes["description"]))
