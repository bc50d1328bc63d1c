"""The files of a run by name: what `outputs/`, `logs/` and `artifacts/` hold, put in and taken out."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.errors import FileNameError, RunNotFoundError, RunStateError, UserError
from paceline.runs.folder import RunFolder, check_file_name
from paceline.system import links
from paceline.system.files import copy_whole, walk_files

#: Where files may be put, by links in these folders too. While a run goes on, its outputs may lie in its working directory.
_WRITTEN = (*links.KEPT, "logs", "work")
_CHUNK_BYTES = 1 << 20


def names(folder: RunFolder) -> list[str]:
    """The names of all files, sorted, with forward slashes: `outputs/model.pt`, `logs/rank_0.log`, `plot.png`.

    Behind a link to another of the run's files or folders lies what it leads to; a link that leads out of the run, or
    nowhere, is no file of the run's.
    """
    return [name for name, _ in files(folder)]


def files(folder: RunFolder) -> list[tuple[str, Path]]:
    """(name, where it lies, by a way without links) of each file, sorted by name."""
    return sorted(
        (_name(folder, entry), folder.path / entry.real) for entry in _entries(folder) if entry.kind == "file"
    )


def left_out(folder: RunFolder) -> list[str]:
    """The names among them, sorted, of what is no file of the run's: a pipe, a link that leads nowhere or out of the run."""
    return sorted(_name(folder, entry) for entry in _entries(folder) if entry.kind == "left")


def put(folder: RunFolder, name: str, source: str | os.PathLike[str] | IO[bytes]) -> str:
    """Copy a file or the rest of an open binary stream into the run; the name it has there.

    A file that is already the one of this name, or equal to it, is left as it is.

    Raises:
        FileNameError: the name leaves the run's folder, or a link on the way does.
        RunStateError: another file has this name.
        UserError: `source` is no file.
    """
    plain = check_file_name(name)
    if isinstance(source, (str, os.PathLike)) and not os.path.isfile(source):
        raise UserError(
            f"{os.fspath(source)!r} is not a file. Give the path of a file; for folders there is upload_folder."
        )
    where = _place(folder, plain)
    # A script may upload outputs/model.pt under that very name: the file is there already.
    if isinstance(source, (str, os.PathLike)) and _is_same(folder, where, source):
        return plain
    parent, _, last = where.rpartition("/")
    # Written under a name of its own first, so that no reader meets a part of it.
    at, beside = _open_folder(folder, plain, parent), f".upload-{os.urandom(8).hex()}"
    try:
        # Under a folder that is open already: by its path, a link could have come between the check and this.
        with open(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=at), "wb") as file:
            if isinstance(source, (str, os.PathLike)):
                with open(source, "rb") as opened:
                    shutil.copyfileobj(opened, file)
            else:
                shutil.copyfileobj(source, file)
        try:
            # A link, not a rename: of two ranks that upload the same name at once, one is told.
            os.link(beside, last, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except FileExistsError:
            if not _is_equal(folder, where, at, beside):
                raise RunStateError(
                    f"run {folder.run_id} has another file {plain!r} already. Upload under another name."
                ) from None
    # Once it is linked the file has two names. This one goes in any case.
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=at)
        os.close(at)
    return plain


def put_folder(folder: RunFolder, name: str, source: str | os.PathLike[str]) -> list[str]:
    """Copy every file below the folder `source` to `name/...`; their names. Links are followed.

    Raises: as `put`; UserError where `source` is no folder, or has a link that leads nowhere, a pipe or the like in it.
    """
    top = check_file_name(name)
    if not os.path.isdir(source):
        raise UserError(f"{os.fspath(source)!r} is not a folder. For single files there is upload_file.")
    # All names are found before the first file is copied, so that a pipe among them is refused with nothing uploaded.
    return [put(folder, f"{top}/{part}", Path(source) / part) for part in _below(Path(source))]


def get(folder: RunFolder, name: str, target: str | os.PathLike[str] | None = None) -> str:
    """Copy the run's file out; the path written.

    target: a path, or an existing folder or a path that ends in a slash; None for the file's own name in the working directory.

    Raises:
        RunNotFoundError: the run has no such file; nor has it what a link in it leads to elsewhere.
    """
    plain = check_file_name(name)
    found = links.find(os.fspath(folder.path), _place(folder, plain))
    if found is not None and found.kind == "left":
        raise RunNotFoundError(
            f"run {folder.run_id} has no file {plain!r}: that is {found.why}, and no file of the run's."
        )
    if found is None or found.kind != "file":
        there = ", ".join(names(folder)[:10]) or "none"
        raise RunNotFoundError(f"run {folder.run_id} has no file {plain!r}. Its files: {there}.")
    last = plain.rpartition("/")[2]
    path = Path(os.fspath(target)) if target is not None else Path(last)
    if path.is_dir() or (target is not None and os.fspath(target).endswith("/")):
        path = path / last
    copy_whole(folder.path / found.real, path, top=folder.path)
    return str(path)


def _place(folder: RunFolder, plain: str) -> str:
    return folder.file(plain).relative_to(folder.path).as_posix()


def _entries(folder: RunFolder) -> Iterator[links.Entry]:
    for top in (folder.outputs, folder.logs, folder.artifacts):
        yield from links.entries(os.fspath(folder.path), top.name, follow=True)


def _name(folder: RunFolder, entry: links.Entry) -> str:
    return entry.name.removeprefix(f"{folder.artifacts.name}/")


def _open_folder(folder: RunFolder, plain: str, name: str) -> int:
    """Open a folder to write in, made where there is none."""
    top = os.path.realpath(folder.path)
    place = os.path.relpath(os.path.realpath(os.path.join(top, name)), top)
    # Before the folder is made: a name behind a link of the script's would make it wherever that leads.
    if not links.may_be_had(name, place) or place.split("/")[0] not in _WRITTEN:
        raise FileNameError(
            f"file name {plain!r} lies behind a link, which leads out of the run's files, to "
            f"{os.path.normpath(os.path.join(top, place))!r}. Give a name without that link."
        )
    os.makedirs(os.path.join(top, place), exist_ok=True)
    # Opened part by part, and no link followed: since the look above, a folder may have become one.
    return links.open_folder_below(top, place)


def _is_same(folder: RunFolder, where: str, source: str | os.PathLike[str]) -> bool:
    found = links.find(os.fspath(folder.path), where)
    return found is not None and found.kind == "file" and os.path.samefile(source, folder.path / found.real)


def _is_equal(folder: RunFolder, where: str, at: int, beside: str) -> bool:
    found = links.find(os.fspath(folder.path), where)
    if found is None or found.kind != "file":
        return False
    with (
        open(links.open_below(os.fspath(folder.path), found.real), "rb") as one,
        open(os.open(beside, os.O_RDONLY | os.O_CLOEXEC, dir_fd=at), "rb") as other,
    ):
        while True:
            mine, theirs = one.read(_CHUNK_BYTES), other.read(_CHUNK_BYTES)
            if mine != theirs or not mine:
                return mine == theirs


def _below(top: Path) -> list[str]:
    """The names of all files below a folder of the user's, links followed."""
    found: list[str] = []
    for name, entry, is_file in walk_files(top):
        if not is_file:
            raise UserError(
                f"{entry.path!r} is no file: a link that leads nowhere, a pipe or the like. Nothing was "
                "uploaded. Remove it, or upload the files one by one."
            )
        found.append(name)
    return sorted(found)
