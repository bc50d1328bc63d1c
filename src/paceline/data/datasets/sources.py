"""Sources of data: parse them, and get their files as local paths."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source

Where: TypeAlias = "tuple[tuple[Source, ...], Path | None]"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def sources_of(path: object) -> Where:
    """Return the sources that `path` names, and their workspace's folder (None without a `Datastore`).

    Args:
        path: A URL, a local path (folder, file, or pattern with `*`, `?` or `**`), a pair (datastore, path), a
            `DataReference`, a whole `Datastore`, or a list of these. A datastore is a `Datastore` or its name.

    Raises:
        DataError: `path` is none of these or empty, mixes datastores of two workspaces, or is a URL with a password.
    """
    sources: list[Source] = []
    workspaces: set[Path] = set()
    for item in path if isinstance(path, list) else [path]:
        for source, workspace in _sources(item):
            sources.append(source)
            if workspace is not None:
                workspaces.add(workspace)
    if not sources:
        raise DataError(f"path={path!r} names no files. Give a path, a URL, (datastore, path) or a list of such.")
    if len(workspaces) > 1:
        named = ", ".join(repr(str(workspace)) for workspace in sorted(workspaces))
        raise DataError(f"the datastores are of several workspaces ({named}); a dataset belongs to one.")
    return tuple(dict.fromkeys(sources)), workspaces.pop() if workspaces else None


def workspace_dir_of(workspace: object) -> Path:
    """Return the folder of a workspace, or raise DataError for another object."""
    path = getattr(workspace, "path", None)
    # Refuse path objects: an `os.DirEntry` has an attribute `path` like a workspace, but is not a workspace.
    if not isinstance(path, (str, os.PathLike)) or isinstance(workspace, os.PathLike):
        raise DataError(f"{workspace!r} is not a workspace. Give Workspace.from_config(), or Workspace(folder).")
    return Path(path)


def is_local(source: Source) -> bool:
    """Return whether a dataset's source is one local folder or file, not a pattern."""
    return source.datastore is None and source.path.startswith("/") and not set(source.path) & {"*", "?"}


def _sources(item: object) -> Sequence[tuple[Source, Path | None]]:
    if isinstance(item, DataReference):
        if item.is_output:
            raise DataError(f"{item.name!r} is an output (as_upload); a dataset is made of files that are there.")
        return [(source, None) for source in item.sources]
    if isinstance(item, tuple) and len(item) == 2 and (isinstance(item[1], (str, os.PathLike))):
        name, workspace = _store(item[0])
        return [(Source(datastore=name, path=os.fspath(item[1])), workspace)]
    if isinstance(item, (str, os.PathLike)):
        return [(Source(path=_place(os.fspath(item))), None)]
    if isinstance(getattr(item, "name", None), str) and hasattr(item, "datastore_type"):
        name, workspace = _store(item)
        return [(Source(datastore=name), workspace)]
    raise DataError(f"{item!r} names no files. Give a path, a URL, (datastore, path), a DataReference or a list.")


def _store(store: object) -> tuple[str, Path | None]:
    if isinstance(store, str):
        return store, None
    name = getattr(store, "name", None)
    if not isinstance(name, str):
        raise DataError(f"{store!r} is not a datastore. Give a Datastore, or its name.")
    workspace = getattr(store, "workspace", None)
    folder = getattr(workspace, "path", workspace)
    return name, Path(folder) if isinstance(folder, (str, os.PathLike)) else None


def _place(text: str) -> str:
    if not text or "\0" in text:
        raise DataError(f"path={text!r} names no files.")
    if not _URL.match(text):
        return os.path.abspath(os.path.expanduser(text))
    if text.lower().startswith("file://"):
        return os.path.abspath(unquote(urlsplit(text).path))
    from paceline.data.stores.credentials import check_no_secrets

    check_no_secrets(text, {})
    return text


@dataclass(frozen=True)
class LocalFile:
    """A local file and its path below the dataset's folder, with `/`."""

    relative: str
    path: Path


@contextlib.contextmanager
def local_files(sources: Sequence[Source], workspace_dir: Path) -> Iterator[list[LocalFile]]:
    """Yield a dataset's files as local files, sorted by relative path.

    Files of remote stores are downloaded to the data cache. Their paths are valid only within the `with` block.

    Raises:
        DataError: A source does not exist.
        TransferError: A store can't be read.
    """
    if len(sources) == 1 and is_local(sources[0]):
        # Workers list the folder of an input by this branch, so it uses the standard library only.
        yield _below(Path(sources[0].path))
        return
    from paceline.data.transfer.cache import DataCache
    from paceline.data.transfer.fetch import fetch

    cache, reader = DataCache(), f"dataset-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        # Callbacks run in reverse order: first the folder of links is removed, and then its lock is released.
        stack.callback(os.close, cache.hold_view(reader))
        stack.callback(cache.drop_views, reader)
        fetched = fetch(
            DataReference(name="dataset", sources=tuple(sources)),
            workspace_dir=workspace_dir,
            cache=cache,
            view_dir=cache.view_dir(reader, 0),
            node_rank=0,
            ranks=range(1),
            node_count=1,
            world_size=1,
        )
        yield _below(fetched.path)


def _below(top: Path) -> list[LocalFile]:
    if top.is_file():
        return [LocalFile(top.name, top)]
    if not top.is_dir():
        raise DataError(f"there is nothing at {str(top)!r}, where files of a dataset were to be.")
    files: list[LocalFile] = []
    for folder, below, names in os.walk(top, followlinks=True):
        here = f"{os.path.realpath(folder)}/"
        # Skip a link to a parent folder, because following it would never end.
        below[:] = [name for name in below if not here.startswith(f"{os.path.realpath(Path(folder, name))}/")]
        # Skip sockets and broken links.
        paths = [path for path in (Path(folder, name) for name in names) if path.is_file()]
        files += [LocalFile(path.relative_to(top).as_posix(), path) for path in paths]
    return sorted(files, key=lambda file: file.relative)
