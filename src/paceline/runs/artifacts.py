"""List, add and copy the files of a run by name, in `outputs/`, `logs/` and `artifacts/`."""

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

#: The folders that may contain a run's files after links are resolved. During a run `outputs` may be a link into `work`.
_WRITTEN = (*links.KEPT, "logs", "work")
_CHUNK_BYTES = 1 << 20


def names(folder: RunFolder) -> list[str]:
    """Return the sorted names of a run's files, such as `outputs/model.pt`.

    Links to other files or folders of the run are followed; links that lead out of the run, or nowhere, are excluded.
    """
    return [name for name, _ in files(folder)]


def files(folder: RunFolder) -> list[tuple[str, Path]]:
    """Return (name, resolved path) of each of a run's files, sorted by name."""
    return sorted(
        (_name(folder, entry), folder.path / entry.real) for entry in _entries(folder) if entry.kind == "file"
    )


def files_below(folder: RunFolder, name: str) -> list[tuple[str, Path]]:
    """Return (name, resolved path) of each file below a run's folder such as `work/logs`."""
    entries = links.entries(os.fspath(folder.path), name, follow=True)
    return [(entry.name, folder.path / entry.real) for entry in entries if entry.kind == "file"]


def left_out(folder: RunFolder) -> list[str]:
    """Return the sorted names of pipes, broken links and links out of the run."""
    return sorted(_name(folder, entry) for entry in _entries(folder) if entry.kind == "left")


def put(folder: RunFolder, name: str, source: str | os.PathLike[str] | IO[bytes]) -> str:
    """Copy a file or open stream into the run. Return its name there.

    If the run already has a file of this name with equal content, nothing changes.

    Raises:
        FileNameError: The name leaves the run's folder, perhaps by a link.
        RunStateError: Another file has this name.
        UserError: `source` is not a file.
    """
    plain = check_file_name(name)
    if isinstance(source, (str, os.PathLike)) and not os.path.isfile(source):
        raise UserError(f"{os.fspath(source)!r} is not a file. Give a file's path; for folders there is upload_folder.")
    where = _place(folder, plain)
    # Copy nothing if the source already is the run's file of this name, as in an upload of outputs/model.pt under this name.
    if isinstance(source, (str, os.PathLike)) and _is_same(folder, where, source):
        return plain
    parent, _, last = where.rpartition("/")
    # First write under a temporary name, so that readers see only whole files.
    at, beside = _open_folder(folder, plain, parent), f".upload-{os.urandom(8).hex()}"
    try:
        # Open the file relative to the folder's descriptor, because a part of the path may have become a link since the check.
        with open(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=at), "wb") as file:
            if isinstance(source, (str, os.PathLike)):
                with open(source, "rb") as opened:
                    shutil.copyfileobj(opened, file)
            else:
                shutil.copyfileobj(source, file)
        try:
            # Call `link` instead of `rename`: if two ranks upload the same name at once, the second rank gets an error.
            os.link(beside, last, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except FileExistsError:
            if not _is_equal(folder, where, at, beside):
                raise RunStateError(
                    f"run {folder.run_id} has another file {plain!r} already. Upload under another name."
                ) from None
    # Remove the temporary name even after a success, because the file then has its final name as well.
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=at)
        os.close(at)
    return plain


def put_folder(folder: RunFolder, name: str, source: str | os.PathLike[str]) -> list[str]:
    """Copy all files below `source` to `name/...` in the run. Return their names.

    Raises:
        UserError: As for `put`; or `source` is not a folder, or has a broken link or a pipe in it.
    """
    top = check_file_name(name)
    if not os.path.isdir(source):
        raise UserError(f"{os.fspath(source)!r} is not a folder. For single files there is upload_file.")
    # List all names before the first copy, so that a pipe among the files stops the upload at once.
    return [put(folder, f"{top}/{part}", Path(source) / part) for part in _below(Path(source))]


def get(folder: RunFolder, name: str, target: str | os.PathLike[str] | None = None) -> str:
    """Copy one of the run's files, and return the written path.

    target: A path of a file, or a folder (existing, or with a trailing slash), where the file keeps its name. By
    default, the current directory.

    Raises:
        RunNotFoundError: The run has no such file, or the file is a link that leads out of the run.
    """
    plain = check_file_name(name)
    found = links.find(os.fspath(folder.path), _place(folder, plain))
    if found is not None and found.kind == "left":
        raise RunNotFoundError(f"run {folder.run_id} has no file {plain!r}: it is {found.why}, no file of the run's.")
    if found is None or found.kind != "file":
        there = ", ".join(names(folder)[:10]) or "none"
        raise RunNotFoundError(f"run {folder.run_id} has no file {plain!r}. Its files: {there}.")
    last = plain.rpartition("/")[2]
    path = Path(os.fspath(target)) if target is not None else Path(last)
    if path.is_dir() or (target is not None and os.fspath(target).endswith("/")):
        path = path / last
    copy_out(folder, folder.path / found.real, path)
    return str(path)


def copy_out(folder: RunFolder, path: Path, target: Path) -> None:
    """Copy a file, given by its resolved path, out of the run."""
    copy_whole(path, target, top=folder.path)


def _place(folder: RunFolder, plain: str) -> str:
    return folder.file(plain).relative_to(folder.path).as_posix()


def _entries(folder: RunFolder) -> Iterator[links.Entry]:
    for top in (folder.outputs, folder.logs, folder.artifacts):
        yield from links.entries(os.fspath(folder.path), top.name, follow=True)


def _name(folder: RunFolder, entry: links.Entry) -> str:
    return entry.name.removeprefix(f"{folder.artifacts.name}/")


def _open_folder(folder: RunFolder, plain: str, name: str) -> int:
    top = os.path.realpath(folder.path)
    place = os.path.relpath(os.path.realpath(os.path.join(top, name)), top)
    # Check the name before creating the folder: if the name goes through a link, the folder could be outside the run.
    if not links.may_be_had(name, place) or place.split("/")[0] not in _WRITTEN:
        raise FileNameError(
            f"file name {plain!r} goes through a link, which leads out of the run's files, to "
            f"{os.path.normpath(os.path.join(top, place))!r}. Give a name without that link."
        )
    os.makedirs(os.path.join(top, place), exist_ok=True)
    # Open the path part by part without following links, because a folder may have become a link since the check.
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
    found: list[str] = []
    for name, entry, is_file in walk_files(top):
        if not is_file:
            raise UserError(
                f"{entry.path!r} is not a file: a link that leads nowhere, a pipe or the like. Nothing was "
                "uploaded. Remove it, or upload the files one by one."
            )
        found.append(name)
    return sorted(found)
