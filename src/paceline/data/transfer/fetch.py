"""Fetch a job's input into a folder on this node before the workers start."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.data.sampling.partition import split_by_size
from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import check_tree, clean_path, is_pattern
from paceline.data.stores.record import StoreRecord
from paceline.data.transfer.cache import DataCache
from paceline.data.transfer.listing import FileInfo, fingerprint, is_single_file, list_files, path_in_store
from paceline.data.transfer.partial import FileToFetch, Partial
from paceline.data.transfer.progress import Meter, Progress, size_text
from paceline.data.transfer.transfer import transfer
from paceline.errors import DataError, EngineError, TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.system.serialization import plain_fields

Say = Callable[[str], None]
_LINK_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The files of an input that a node has fetched.

    Attributes:
        path: The folder with the files, or the file if the input is exactly one file.
        mode: "mount" (the original folder, or links to the original files) or "download".
        files, bytes: Number and total size of this node's files.
        fetched_bytes: Bytes transferred; the other bytes were in the cache.
        fingerprint: Hash of all files of the input, equal on all nodes.
        note: A message for the user, or "".
    """

    name: str
    path: Path
    mode: str
    files: int
    bytes: int
    fetched_bytes: int
    fingerprint: str
    note: str = ""

    def to_json(self) -> dict[str, object]:
        return plain_fields(self)


def fetch(
    reference: DataReference,
    *,
    workspace_dir: Path,
    cache: DataCache,
    view_dir: Path,
    node_rank: int,
    ranks: range,
    node_count: int,
    world_size: int,
    say: Say = lambda text: None,
    progress: Progress | None = None,
) -> Fetched:
    """Fetch this node's files of an input into `view_dir/<name>`.

    If the input is partitioned by rank, each rank of the node gets a folder `view_dir/<name>/rank_<r>`. A "mount" of one
    folder on this machine gets no new folder, because scripts read it in place. If an error is raised, no new folder stays.

    Raises:
        DataError: A source does not exist or is empty, two files have one name, or a store is memory://.
        TransferError: A store or file can't be read.
    """
    places = [place_of(source, workspace_dir) for source in reference.sources]
    _refuse_memory(reference, [record for record, _ in places])
    infos = list_files(reference.sources, workspace_dir)
    whole = Fetched(
        name=reference.name,
        path=view_dir / reference.name,
        mode="mount",
        files=len(infos),
        bytes=_sum(infos),
        fetched_bytes=0,
        fingerprint=fingerprint(infos),
    )
    is_local = all(record.kind == "local" for record, _ in places)
    # A partition needs a folder of links, because no existing folder holds only this part of the files.
    if reference.mode == "mount" and is_local and reference.partition is None:
        itself = _place_itself(places)
        if itself is not None:
            return replace(whole, path=itself)
    if not infos:
        titles = ", ".join(record.title for record, _ in places)
        raise DataError(f"input {reference.name!r} has no files: {titles} is empty. Upload some or name another place.")
    _check_names(reference, infos)
    parts = _parts(reference, infos, node_rank, ranks, node_count, world_size)
    own = [info for part in parts.values() for info in part]
    with _held(cache, view_dir), _new_view(view_dir, reference.name) as folder:
        if is_local and (reference.mode == "mount" or reference.partition is not None):
            for name, part in parts.items():
                _link_local(folder / name, part, reference.sources, places)
            mode, note, fetched = "mount", "", 0
            if reference.partition is not None:
                note = f"as_partition: links to this {reference.partition}'s own files, nothing was copied"
        else:
            mode, note = "download", _why_not_mounted(reference, [record for record, _ in places])
            if note:
                say(f"input {reference.name!r}: {note}")
            fetched = _download(folder, parts, workspace_dir, cache, Meter(progress, _sum(own), len(own)))
    path = view_dir / reference.name
    if reference.partition is None and is_single_file(infos, reference.sources, workspace_dir):
        path = path / infos[0].relative
    say(f"input {reference.name!r}: {len(own)} files, {size_text(_sum(own))}, {size_text(fetched)} fetched")
    return replace(whole, path=path, mode=mode, note=note, fetched_bytes=fetched, files=len(own), bytes=_sum(own))


def _refuse_memory(reference: DataReference, records: Sequence[StoreRecord]) -> None:
    for record in records:
        if record.kind == "memory":
            raise DataError(
                f"input {reference.name!r} is stored in {record.title}, which is the memory of one process: a run's supervisor "
                "and workers are other processes and can't see it. Upload it to the default datastore instead."
            )


def _place_itself(places: Sequence[tuple[StoreRecord, str]]) -> Path | None:
    """Return an input's real path if it is one local folder or file, else None."""
    [(record, path), *others] = places
    if others or is_pattern(path):
        return None
    return Path(os.path.realpath(Path(record.root or "/", clean_path(path, record.title).strip("/"))))


def _check_names(reference: DataReference, infos: Sequence[FileInfo]) -> None:
    seen: dict[str, FileInfo] = {}
    for info in infos:
        other = seen.setdefault(info.relative, info)
        if other is not info:
            raise DataError(
                f"input {reference.name!r} has two files {info.relative!r}: {other.path!r} and {info.path!r}. "
                "Name a folder that holds both, or make two inputs."
            )
    check_tree(seen, f"input {reference.name!r}")


def _parts(
    reference: DataReference, infos: Sequence[FileInfo], node_rank: int, ranks: range, node_count: int, world_size: int
) -> dict[str, list[FileInfo]]:
    if reference.partition is None:
        return {"": list(infos)}
    by_name = {info.relative: info for info in infos}
    count = node_count if reference.partition == "node" else world_size
    split = split_by_size([(info.relative, max(info.size, 0)) for info in infos], count)
    if reference.partition == "node":
        return {"": [by_name[name] for name in split[node_rank]]}
    return {f"rank_{rank}": [by_name[name] for name in split[rank]] for rank in ranks}


@contextlib.contextmanager
def _held(cache: DataCache, view_dir: Path) -> Iterator[None]:
    """Protect a run's data folder from removal while it is filled."""
    if cache.views not in view_dir.parents:
        yield
        return
    run_id = view_dir.relative_to(cache.views).parts[0]
    is_unheld = cache.is_unheld(run_id)
    fd = cache.hold_view(run_id)
    try:
        yield
        if is_unheld:
            # Mark the folder of links as used before releasing the lock. Then only this mark protects the folder.
            cache.note_unheld(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _new_view(view_dir: Path, name: str) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `view_dir/<name>` on success."""
    target, beside = view_dir / name, view_dir / f".{name}.new"
    try:
        view_dir.mkdir(parents=True, exist_ok=True)
        for path in (beside, target):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        beside.mkdir()
        yield beside
        os.rename(beside, target)
    except EngineError:
        raise  # the caller's `with` block has raised this error, which needs no other message
    except OSError as error:
        raise TransferError(
            f"the folder of input {name!r} can't be made in {str(view_dir)!r}: {error.strerror}. "
            "Make room there, or put the cache elsewhere with PACELINE_DATA_CACHE."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _link_local(
    folder: Path, infos: Sequence[FileInfo], sources: Sequence[Source], places: Sequence[tuple[StoreRecord, str]]
) -> None:
    folder.mkdir(exist_ok=True)
    # Store paths are relative to the store's root; paths without a store are absolute.
    roots = {source.datastore: record.root or "/" for source, (record, _) in zip(sources, places, strict=True)}
    for info in infos:
        target = folder / info.relative
        target.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(Path(roots[info.datastore], path_in_store(info)), target)


def _download(
    folder: Path, parts: dict[str, list[FileInfo]], workspace_dir: Path, cache: DataCache, meter: Meter
) -> int:
    stores: dict[str | None, list[tuple[FileInfo, str]]] = {}
    folders: set[str] = set()
    for name, part in parts.items():
        top = str(folder / name)
        os.makedirs(top, exist_ok=True)
        for info in part:
            target = f"{top}/{info.relative}"
            # Create each folder only once, because data sets have far more files than folders.
            if (above := target.rpartition("/")[0]) not in folders:
                os.makedirs(above, exist_ok=True)
                folders.add(above)
            stores.setdefault(_store_key(info), []).append((info, target))
    fetched = 0
    for wanted in stores.values():
        record, _ = place_of(Source(datastore=wanted[0][0].datastore, path=wanted[0][0].path), workspace_dir)
        with Store(record) as store:
            fetched += _from_store(store, wanted, cache, meter)
    meter.finish()
    return fetched


def _from_store(store: Store, wanted: list[tuple[FileInfo, str]], cache: DataCache, meter: Meter) -> int:
    identity, fetched = store.record.identity, 0
    # Repeat: another run that needs room may evict a fetched file before it is linked here.
    for _ in range(_LINK_TRIES):
        missing: list[tuple[FileInfo, str, str]] = []
        for info, target in wanted:
            key = cache.key(identity, info.path, info.version, info.size)
            # Use the cache only if the store reports a version: otherwise the cached file may be outdated.
            if info.version and cache.link(key, info.size, target):
                meter.add(max(info.size, 0), files=1)
            else:
                missing.append((info, target, key))
        if not missing:
            return fetched
        cache.make_room(sum(max(info.size, 0) for info, _, _ in missing))
        fetched += transfer(store, [_job(*item, cache) for item in missing], meter)
        # `cache.keep` links each file after its transfer, so try again only the files that have no link.
        wanted = [(info, target) for info, target, _ in missing if not os.path.lexists(target)]
        if not wanted:
            return fetched
    raise TransferError(
        f"the cache {str(cache.folder)!r} lost files of {store.title} as fast as they came, because other runs need its "
        f"room. Let them end, or give it a higher limit than {size_text(cache.limit_bytes)}."
    )


def _job(info: FileInfo, target: str, key: str, cache: DataCache) -> FileToFetch:
    def place(partial: Partial) -> None:
        cache.keep(key, partial, target)

    return FileToFetch(
        path=path_in_store(info),
        size=info.size,
        version=info.version,
        part=cache.part(key),
        place=place,
        is_there=lambda: bool(info.version) and cache.link(key, info.size, target),
    )


def _store_key(info: FileInfo) -> str:
    if info.datastore is not None or "://" not in info.path:
        return info.datastore or "/"
    # The first three parts of a URL, "https:", "" and "host", identify the URL's server.
    return "/".join(info.path.split("/", 3)[:3])


def _why_not_mounted(reference: DataReference, records: Sequence[StoreRecord]) -> str:
    if reference.mode != "mount":
        return ""
    record = next(record for record in records if record.kind != "local")
    name = f"datastore {record.name!r}" if record.name is not None else repr(record.url)
    return f"as_mount: {name} ({record.kind}) can't be mounted here, so its files were downloaded"


def _sum(infos: Sequence[FileInfo]) -> int:
    return sum(max(info.size, 0) for info in infos)
