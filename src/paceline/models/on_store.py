"""Push and pull of versions to and from a datastore, verified and resumable.

    <path>/.blobs/<sha256>                   each content once
    <path>/<name>/<version>/model.json       the record, written last: without it there is no version

A version is the same in both places: `digits:3` is never two models. Files are stored by content, so a killed push does not
store them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import check_relative, check_tree, clean_path
from paceline.data.transfer.listing import FileInfo, list_source, path_in_store
from paceline.data.transfer.partial import FileToFetch, Partial
from paceline.data.transfer.progress import Meter, Progress
from paceline.data.transfer.reading import reader_of
from paceline.data.transfer.transfer import transfer
from paceline.data.transfer.upload import put_files, put_new, read_bytes
from paceline.errors import DataError, ModelChangedError, ModelError, ModelNotFoundError, TransferError
from paceline.job.data_reference import Source
from paceline.models import check, keep, registry, staging
from paceline.models.names import NAME
from paceline.models.record import DOCUMENT, ModelFile, ModelRecord, digest_of
from paceline.models.sources import ModelSourceFile
from paceline.runs import tags_and_properties
from paceline.system.names import did_you_mean

#: Folder of the models in a datastore, unless a path is given.
DEFAULT_PATH = "models"
_STORE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)(?::(.*))?", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The result of a push. stored, stored_bytes: the files that were new."""

    place: str
    stored: int
    stored_bytes: int
    is_new: bool


def place(text: str) -> Source:
    """Parse STORE, STORE:PATH, a URL or an absolute path.

    Raises:
        ModelError: The text is none of these.
    """
    if "://" in text or text.startswith("/"):
        return Source(path=text)
    match = _STORE.fullmatch(text)
    if match is None:
        raise ModelError(f"{text!r} is not a place of models. Write STORE, STORE:PATH or a URL, as s3://bucket/models.")
    return Source(datastore=match[1], path=DEFAULT_PATH if match[2] is None else match[2])


def push(
    workspace_dir: Path, record: ModelRecord, to: Source, progress: Progress | None = None, *, verify: bool = False
) -> Pushed:
    """Store a version, skipping files that exist there. Readers see it only when complete.

    Args:
        workspace_dir: Folder of the workspace.
        record: The version.
        to: The destination.
        progress: Called with the progress.
        verify: Read every stored byte, and store again files that have changed.

    Raises:
        ModelError: Another model has this name and version there.
        ModelChangedError: The version's files have changed.
        DataError, TransferError: The store can't be written.
    """
    folder = registry.files_dir(workspace_dir, record)
    check.refuse(record, check.changes(folder, record))
    with _opened(workspace_dir, to) as (store, path):
        document = f"{path}{record.name}/{record.version}/{DOCUMENT}"
        there = read_bytes(store, document)
        if there is not None:
            _check_same(record, there, store)
        infos = _contents(store, to, path)
        wanted = {file.sha256: file for file in record.files if not _is_whole(store, infos, file, verify)}
        put_files(
            store,
            f"{path}.blobs",
            [(sha256, folder / one.name) for sha256, one in sorted(wanted.items())],
            progress,
            by_content=True,
        )
        # Files that are not in `wanted` have been checked already.
        infos = _contents(store, to, path) if wanted else {}
        if short := [
            one.name for one in record.files if one.sha256 in wanted and not _is_whole(store, infos, one, verify)
        ]:
            raise TransferError(f"{short[0]!r} of model {record.id} is not whole in {store.title}. Push again.")
        notes = registry.notes_of(workspace_dir, record)
        content = {**record.to_json(), "notes": asdict(notes)}
        is_new = there is None and put_new(store, json.dumps(content).encode() + b"\n", document)
        if not is_new:
            # Another process may have stored a record at the same time.
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
    """Fetch a version under the same name and number.

    Raises:
        ModelNotFoundError: The version is not there; the message lists those that are.
        ModelError: Another model has this name and version here, or the stored record is invalid.
        ModelChangedError: A stored file has changed.
        DataError, TransferError: The store can't be read.
    """
    with _opened(workspace_dir, place_of_models) as (store, path):
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
    """List (name, version) of all stored versions, sorted.

    Raises:
        DataError, TransferError: The store can't be read.
    """
    models = []
    with _opened(workspace_dir, place_of_models) as (store, path):
        for info in _listed(store, place_of_models, path):
            parts = path_in_store(info).removeprefix(path).split("/")
            if len(parts) == 3 and parts[2] == DOCUMENT and NAME.fullmatch(parts[0]) and parts[1].isdigit():
                models.append((parts[0], int(parts[1])))
    return sorted(models)


@contextlib.contextmanager
def _opened(workspace_dir: Path, place_of_models: Source) -> Iterator[tuple[Store, str]]:
    record, path = place_of(place_of_models, workspace_dir)
    with Store(record) as store:
        plain = clean_path(path, store.title).rstrip("/")
        yield store, f"{plain}/" if plain else ""


def _listed(store: Store, source: Source, path: str) -> list[FileInfo]:
    try:
        return list_source(store, source, path)
    except DataError:
        return []  # no version is stored yet


def _contents(store: Store, source: Source, path: str) -> dict[str, FileInfo]:
    return {info.path.rpartition("/")[2]: info for info in _listed(store, source, f"{path}.blobs/")}


def _is_whole(store: Store, infos: Mapping[str, FileInfo], file: ModelFile, verify: bool) -> bool:
    info = infos.get(file.sha256)
    if info is None or info.size != file.size_bytes:
        return False
    if not verify:
        return True
    digest, path = hashlib.sha256(), path_in_store(info)
    with store.translating(f"reading {path!r}"):
        reader_of(store).read(path, 0, info.size, info.version, True, digest.update)
    return digest.hexdigest() == file.sha256


def _check_same(record: ModelRecord, content: bytes, store: Store) -> None:
    there, _ = _read(content, store)
    if there.digest != record.digest:
        raise ModelError(
            f"there is another model {record.id} in {store.title}: registered {there.created_utc} by {there.registered_by}, "
            f"digest {there.digest[:12]} and not {record.digest[:12]}. Register this one under another name, or push it to "
            "another path."
        )


def _read(content: bytes, store: Store) -> tuple[ModelRecord, dict[str, dict[str, object]]]:
    """Parse a stored record, whose names stay in its folder."""
    try:
        data = json.loads(content)
        record = ModelRecord.from_json(data)
        for file in record.files:
            check_relative(file.name, store.title)
            if not _SHA256.fullmatch(file.sha256) or type(file.size_bytes) is not int or file.size_bytes < 0:
                raise ValueError(file.name)
            if file.name.partition("/")[0] != record.top:
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
    infos = _contents(store, source, path)
    missing, came, jobs = [], {}, []
    for file in record.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if keep.take(blobs, file.size_bytes, file.sha256, target):
            continue
        missing.append(file)
        if file.sha256 not in came:
            info = infos.get(file.sha256)
            if info is None or info.size != file.size_bytes:
                raise ModelChangedError(f"file {file.name!r} of model {record.id} is not whole in {store.title}.")
            fetched.mkdir(parents=True, exist_ok=True)
            came[file.sha256] = fetched / file.sha256
            jobs.append(_job(info, fetched / file.sha256))
    meter = Meter(progress, sum(job.size for job in jobs), len(jobs))
    transfer(store, jobs, meter)
    meter.finish()
    for file in missing:
        fetched_file = ModelSourceFile(name=file.name, path=came[file.sha256])
        if keep.keep(fetched_file, blobs, folder / file.name).sha256 != file.sha256:
            fetched_file.path.unlink(missing_ok=True)
            raise ModelChangedError(
                f"file {file.name!r} of model {record.id} in {store.title} has another content than the registered one. In the "
                f"workspace of its registration, `paceline model push {record.id} ... --verify` stores it again."
            )
    for record_file in came.values():
        record_file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        fetched.rmdir()  # fails while another process pulls


def _job(info: FileInfo, target: Path) -> FileToFetch:
    def finish(partial: Partial) -> None:
        partial.finish(target, mode=0o600, mtime_ns=None)

    return FileToFetch(
        path=path_in_store(info),
        size=info.size,
        version=info.version,
        part=target.with_name(f"{target.name}.part"),
        place=finish,
        is_there=target.exists,
    )


def _write_notes(path: Path, notes: dict[str, dict[str, object]]) -> None:
    tags_and_properties.set_tags(path, notes.get("tags") or {})
    registry.write_properties(path, notes.get("properties") or {})
    if notes.get("description") is not None:
        tags_and_properties.set_name(path, "description", str(notes["description"]))
