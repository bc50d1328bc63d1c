"""The ways in which callers name files, as sources: URLs, paths, (datastore, path) pairs, references."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source

Where: TypeAlias = "tuple[tuple[Source, ...], Path | None]"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def sources_of(path: Any) -> Where:
    """The sources that `path` means, and the workspace of the datastores among them, where they tell it.

    path: a URL, a path of this machine (a folder, a file, or a pattern with `*`, `?` or `**`), a pair (datastore, path), a
        `DataReference`, a `Datastore` for all of it, or a list of such. A datastore is a `Datastore` or its name.

    Raises:
        DataError: none of these, nothing at all, datastores of two workspaces, or a URL with a password in it.
    """
    found: list[Source] = []
    workspaces: set[Path] = set()
    for item in path if isinstance(path, list) else [path]:
        for source, workspace in _sources(item):
            found.append(source)
            if workspace is not None:
                workspaces.add(workspace)
    if not found:
        raise DataError(f"path={path!r} names no files. Give a path, a URL, (datastore, path) or a list of such.")
    if len(workspaces) > 1:
        named = ", ".join(repr(str(workspace)) for workspace in sorted(workspaces))
        raise DataError(f"the datastores are of several workspaces ({named}); a dataset belongs to one.")
    return tuple(dict.fromkeys(found)), workspaces.pop() if workspaces else None


def workspace_dir_of(workspace: Any) -> Path:
    """The folder of a workspace.

    Raises:
        DataError: it is none.
    """
    path = getattr(workspace, "path", None)
    # An `os.DirEntry` has a `path` as well, and is no workspace.
    if not isinstance(path, (str, os.PathLike)) or isinstance(workspace, os.PathLike):
        raise DataError(f"{workspace!r} is no workspace. Give Workspace.from_config(), or Workspace(folder).")
    return Path(path)


def is_local(source: Source) -> bool:
    """True if it is one folder or one file of this machine: no store, no URL, no pattern."""
    return source.datastore is None and source.path.startswith("/") and not set(source.path) & {"*", "?"}


def _sources(item: Any) -> Sequence[tuple[Source, Path | None]]:
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
    raise DataError(
        f"{item!r} names no files. Give a path, a URL, (datastore, path), a DataReference or a list of such."
    )


def _store(store: Any) -> tuple[str, Path | None]:
    if isinstance(store, str):
        return store, None
    name = getattr(store, "name", None)
    if not isinstance(name, str):
        raise DataError(f"{store!r} is no datastore. Give a Datastore, or the name of one.")
    workspace = getattr(store, "workspace", None)
    folder = getattr(workspace, "path", workspace)
    return name, Path(folder) if isinstance(folder, (str, os.PathLike)) else None


def _place(text: str) -> str:
    """A URL as it is, a path of this machine as an absolute one."""
    if not text or "\0" in text:
        raise DataError(f"path={text!r} names no files.")
    if not _URL.match(text):
        return os.path.abspath(os.path.expanduser(text))
    if text.lower().startswith("file://"):
        return os.path.abspath(unquote(urlsplit(text).path))
    from paceline.data.stores.credentials import check_no_secrets

    check_no_secrets(text, {})
    return text
