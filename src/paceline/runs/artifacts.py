"""The files of a run by name: what `outputs/`, `logs/` and `artifacts/` hold, put in and taken out."""

from __future__ import annotations

import filecmp
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

from paceline.errors import RunNotFoundError, RunStateError, UserError
from paceline.runs.files import copy_whole
from paceline.runs.folder import RunFolder, check_file_name


def names(folder: RunFolder) -> list[str]:
    """The names of all files, sorted, with forward slashes: `outputs/model.pt`, `logs/rank_0.log`, `plot.png`."""
    found = [f"{top.name}/{name}" for top in (folder.outputs, folder.logs) for name in _below(top)]
    return sorted(found + list(_below(folder.artifacts)))


def put(folder: RunFolder, name: str, source: str | os.PathLike[str] | IO[bytes]) -> str:
    """Copy a file or the rest of an open binary stream into the run; the name it has there.

    A file that is already the one of this name, or equal to it, is left as it is.

    Raises:
        FileNameError: the name leaves the run's folder.
        RunStateError: another file has this name.
        UserError: `source` is no file.
    """
    plain = check_file_name(name)
    target = folder.file(plain)
    if isinstance(source, (str, os.PathLike)) and not os.path.isfile(source):
        raise UserError(
            f"{os.fspath(source)!r} is not a file. Give the path of a file; for folders there is upload_folder."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".upload-{secrets.token_hex(8)}")
    try:
        if isinstance(source, (str, os.PathLike)):
            if target.exists() and os.path.samefile(source, target):
                return plain
            shutil.copyfile(source, beside)
        else:
            with open(beside, "wb") as file:
                shutil.copyfileobj(source, file)
        try:
            # A link, not a rename: of two ranks that upload the same name at once, one is told.
            os.link(beside, target)
        except FileExistsError:
            if not filecmp.cmp(beside, target, shallow=False):
                raise RunStateError(
                    f"run {folder.run_id} has another file {plain!r} already. Upload under another name."
                ) from None
    finally:
        beside.unlink(missing_ok=True)
    return plain


def put_folder(folder: RunFolder, name: str, source: str | os.PathLike[str]) -> list[str]:
    """Copy every file below the folder `source` to `name/...`; their names.

    Raises: as `put`; UserError where `source` is no folder.
    """
    top = check_file_name(name)
    if not os.path.isdir(source):
        raise UserError(f"{os.fspath(source)!r} is not a folder. For single files there is upload_file.")
    return [put(folder, f"{top}/{part}", Path(source) / part) for part in _below(Path(source))]


def get(folder: RunFolder, name: str, target: str | os.PathLike[str] | None = None) -> str:
    """Copy the run's file out; the path written.

    target: a path, or an existing folder or a path that ends in a slash; None for the file's own name in the working directory.

    Raises:
        RunNotFoundError: the run has no such file.
    """
    plain = check_file_name(name)
    source = folder.file(plain)
    if not source.is_file():
        there = ", ".join(names(folder)[:10]) or "none"
        raise RunNotFoundError(f"run {folder.run_id} has no file {plain!r}. Its files: {there}.")
    path = Path(os.fspath(target)) if target is not None else Path(source.name)
    if path.is_dir() or (target is not None and os.fspath(target).endswith("/")):
        path = path / source.name
    copy_whole(source, path)
    return str(path)


def _below(top: Path) -> list[str]:
    found = []
    for directory, _, files in os.walk(top):
        relative = os.path.relpath(directory, top)
        for name in files:
            path = name if relative == "." else f"{relative}/{name}"
            found.append(path.replace(os.sep, "/"))
    return sorted(found)
