"""Copy a dataset's files, so that changes of the originals do not change it.

    <path>/<hash of all files>/<name>     the copies under their names, as runs read them
    <path>/.contents/<sha256>             only in a local folder: each content once; the copies are hard links

The names and hashes are in `<workspace>/datasets/<name>/<version>.frozen.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from paceline.data.datasets import registered
from paceline.data.datasets.content import content_fingerprint, hash_rest, with_content
from paceline.data.datasets.sources import LocalFile, local_files
from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import clean_path
from paceline.data.stores.record import default_name
from paceline.data.transfer.blobs import found_below, hash_stored, parse_place
from paceline.data.transfer.listing import FileInfo, is_single_file, list_files, path_in_store
from paceline.data.transfer.reading import reader_of
from paceline.data.transfer.upload import READ_ONLY, put_files, remove_file
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.system.files import copy_file, remove_tree

#: Folder of frozen datasets in a datastore, unless a path is given.
DEFAULT_PATH = "frozen"
_AT_ONCE = 4


def freeze(workspace_dir: Path, record: registered.DatasetRecord, to: str | None = None) -> registered.DatasetRecord:
    """Copy the files of a registered dataset version, and return its changed record.

    If the version is frozen already, only check that its copies are unchanged.

    Args:
        workspace_dir: Folder of the workspace.
        record: The record of the version.
        to: STORE, STORE:PATH, a URL or an absolute path; default: the folder "frozen" of the default datastore.

    Raises:
        DataError: A file or a copy has changed since registration, or the copies would sort differently than the files.
        TransferError: A store can't be read or written.
    """
    name = f"{record.name}:{record.version}"
    place = parse_place(to or default_name(workspace_dir), DEFAULT_PATH)
    if place is None:
        raise DataError(f"{to!r} is not a place for a dataset. Write STORE, STORE:PATH, a URL or an absolute path.")
    if (kept := record.frozen) is not None:
        is_there = kept.datastore == place.datastore and kept.path.startswith(f"{place.path.rstrip('/')}/")
        if to is not None and not is_there:
            raise DataError(f"{name} is frozen in {_where(kept)} already, and {to!r} is another place. Leave --to out.")
        if not (found := check_frozen(workspace_dir, record)):
            raise DataError(f"{found}. The frozen files in {_where(kept)} have changed: register a new version.")
        return record
    infos = with_content(list_files(record.sources, workspace_dir), workspace_dir)
    if not (
        found := registered.compare(name, registered.files_then(workspace_dir, record.name, record.version), infos)
    ):
        raise DataError(f"{found}. Register a new version, and freeze that one.")
    names = [info.relative for info in infos]
    # The order of rows follows from the order of the files' paths, so frozen paths must sort as the original paths do.
    if names != sorted(set(names)):
        raise DataError(
            f"the files of dataset {name!r} would have another order or equal names in one folder. Register a dataset of one "
            "folder or pattern, and freeze that one."
        )
    with local_files(record.sources, workspace_dir) as files:
        hashes = _hashes([file.path for file in files])
        content = {
            file.relative: (os.stat(file.path).st_size, sha256) for file, sha256 in zip(files, hashes, strict=True)
        }
        source = replace(place, path=f"{place.path.rstrip('/')}/{_tree_name(content)}")
        store_record, path = place_of(source, workspace_dir)
        with Store(store_record) as store:
            if store.kind in READ_ONLY:
                raise DataError(
                    f"nothing can be stored in {store.title}: {READ_ONLY[store.kind]}. Name another datastore."
                )
            _keep(store, clean_path(path, store.title), source, files, content)
    if is_single_file(infos, record.sources, workspace_dir):
        source = replace(source, path=f"{source.path}/{names[0]}")
    stored = with_content(list_files([source], workspace_dir), workspace_dir)
    frozen = replace(record, frozen=source, frozen_fingerprint=content_fingerprint(stored))
    # Compare the stored files with the registered content, because a file may have changed during the upload.
    if not (found := _compared(workspace_dir, frozen, content)):
        if store_record.kind != "local":
            with Store(store_record) as store, store.translating("removing changed files"):
                for changed in found.changed:
                    remove_file(store, f"{path}/{changed}")
        raise DataError(f"{found}: a file changed while it was stored. Freeze the dataset again.")
    return registered.keep_frozen(workspace_dir, frozen, content)


def check_frozen(workspace_dir: Path, record: registered.DatasetRecord) -> registered.ContentCheck:
    """Return the differences between a frozen dataset version's copies and its record.

    Raises:
        TransferError: The store can't be read.
    """
    return _compared(workspace_dir, record, registered.frozen_files(workspace_dir, record.name, record.version))


def _compared(
    workspace_dir: Path, record: registered.DatasetRecord, content: registered.FrozenFiles
) -> registered.ContentCheck:
    assert record.frozen is not None
    store_record, _ = place_of(record.frozen, workspace_dir)
    with Store(store_record) as store:
        infos = list[FileInfo]()
        with contextlib.suppress(DataError):  # the frozen files were removed from the store
            infos = list_files([record.frozen], workspace_dir)
        reader = reader_of(store)
        with ThreadPoolExecutor(1 if store.kind == "sftp" else _AT_ONCE) as pool:
            hashes = list(pool.map(lambda info: hash_stored(store, reader, info), infos))
    read = [
        replace(info, path=info.relative, datastore=None, version=sha) for info, sha in zip(infos, hashes, strict=True)
    ]
    return registered.compare(
        f"{record.name}:{record.version}", {(None, name): one for name, one in content.items()}, read
    )


def _keep(store: Store, path: str, source: Source, files: Sequence[LocalFile], content: registered.FrozenFiles) -> None:
    if store.kind == "local":
        _keep_here(store.local(path), files, content)
        return
    there = {path_in_store(info): info.size for info in found_below(store, source, f"{path}/")}
    missing = [file for file in files if there.get(f"{path}/{file.relative}") != content[file.relative][0]]
    put_files(store, path, [(file.relative, file.path) for file in missing])


def _keep_here(tree: Path, files: Sequence[LocalFile], content: registered.FrozenFiles) -> None:
    if tree.exists():
        return
    contents, beside = tree.parent / ".contents", tree.with_name(f".new-{secrets.token_hex(4)}")
    try:
        contents.mkdir(parents=True, exist_ok=True)
        for file in files:
            kept, target = contents / content[file.relative][1], beside / file.relative
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = kept.with_name(f".{kept.name}.{secrets.token_hex(4)}")
            if not kept.exists():
                copy_file(os.fspath(file.path), os.fspath(copy))
                if _hashes([copy]) != [kept.name]:
                    copy.unlink()
                    raise DataError(f"{file.relative!r} changed while it was stored. Freeze the dataset again.")
                os.chmod(copy, 0o444)
                os.rename(copy, kept)
            try:
                os.link(kept, target)
            except OSError:  # the file system has no hard links
                copy_file(os.fspath(kept), os.fspath(target))
        os.rename(beside, tree)
    except OSError as error:
        if tree.exists():  # Of two processes that freeze the same files, the first one wins.
            return
        raise DataError(
            f"{str(tree)!r} can't be written: {error.strerror}. Make room, or name another place."
        ) from error
    finally:
        remove_tree(beside)


def _hashes(paths: Sequence[Path]) -> list[str]:
    def digest(path: Path) -> str:
        with open(path, "rb", buffering=0) as file:
            return hash_rest(file)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(digest, paths))


def _tree_name(content: registered.FrozenFiles) -> str:
    digest = hashlib.sha256(b"paceline frozen 1\0")
    for name, (size, sha256) in sorted(content.items()):
        digest.update(f"{name}\0{size}\0{sha256}\0\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _where(source: Source) -> str:
    return repr(f"{source.datastore}:{source.path}" if source.datastore is not None else source.path)
