"""Downloads: files of a run chosen by name or pattern, each copied whole or not at all."""

from __future__ import annotations

import contextlib
import filecmp
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.errors import RunNotFoundError, RunStateError
from paceline.runs import artifacts, work_dir
from paceline.runs.folder import RunFolder
from paceline.system.files import copy_whole
from paceline.system.names import did_you_mean, some

_WILD = frozenset("*?[")
#: A message lists at most this many file names.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A file of a run that can be downloaded.

    Attributes:
        name: The file's name as in `Run.get_file_names`, or "work/..." for a file in the script's working directory.
        path: The file's path with all links resolved.
        top: The run's folder.
    """

    name: str
    path: Path
    size_bytes: int
    top: Path


def files(folder: RunFolder, patterns: Sequence[str] = ()) -> list[RunFile]:
    """Return the run's files that match a pattern, or all, sorted by name.

    A pattern is a file or folder name, or a glob whose `*`, `?` and `[...]` match `/`. Without `/`, it also matches the
    last part of names: `a*.pt` matches `outputs/a1.pt`. Pipes, broken links and links out of the run are skipped.

    Raises:
        RunNotFoundError: A pattern matches no file.
    """
    there = list(_files(folder))
    if not patterns:
        return there
    chosen: set[str] = set()
    for pattern in patterns:
        found = [file.name for file in there if _matches(file.name, pattern)]
        if not found:
            names = [file.name for file in there]
            raise RunNotFoundError(
                f"run {folder.run_id} has no file {pattern!r}.{did_you_mean(pattern, names)} Its files: "
                f"{some(names, _NAMED) or 'none'}. `paceline files {folder.run_id}` shows all."
            )
        chosen.update(found)
    return [file for file in there if file.name in chosen]


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """The result of a download.

    copied: Files that were written. same: Files that `target` already had. gone: Files removed during the download.
    """

    copied: list[RunFile]
    same: list[RunFile]
    gone: list[RunFile]


def download(
    chosen: Sequence[RunFile], target: Path, *, overwrite: bool = False, came: Callable[[int, int], None] | None = None
) -> Downloaded:
    """Copy a run's files to the folder `target`, with their modification times.

    Files that `target` already has with equal content are not copied. A killed download leaves no partial file.

    Args:
        chosen: The files (`files`).
        target: Folder to write to.
        overwrite: Whether to replace files in `target` that have these names but different content.
        came: Called with the number of bytes and the number of complete files that were copied since its last call.

    Raises:
        RunStateError: Files in `target` have these names but different content, and overwrite=False. Nothing is copied.
        OSError: The disk is full, or a folder cannot be written.
    """
    same: list[RunFile] = []
    wanted: list[RunFile] = []
    for file in chosen:
        (same if _is_there(file, target / file.name) else wanted).append(file)
    # Use lexists, which also finds a broken link: the download would overwrite this link, too.
    taken = [file.name for file in wanted if os.path.lexists(target / file.name)]
    if taken and not overwrite:
        raise RunStateError(
            f"{str(target)!r} has other files of {'this name' if len(taken) == 1 else 'these names'}: {some(taken, _NAMED)}. "
            "--overwrite (overwrite=True) replaces them; --to names another folder."
        )
    copied, gone = [], []
    for file in wanted:
        try:
            copy_whole(file.path, target / file.name, came, top=file.top)
            copied.append(file)
        except FileNotFoundError:
            # Skip a source file that is gone. If it exists, the target's folder is missing, which is an error.
            if file.path.exists():
                raise
            gone.append(file)
    return Downloaded(copied=copied, same=same, gone=gone)


def _files(folder: RunFolder) -> Iterator[RunFile]:
    for name, path in sorted([*artifacts.files(folder), *work_dir.left_files(folder)]):
        # The running script may have removed the file since it was listed.
        with contextlib.suppress(OSError):
            yield RunFile(name=name, path=path, size_bytes=os.lstat(path).st_size, top=folder.path)


def _matches(name: str, pattern: str) -> bool:
    plain = pattern.removeprefix("./").rstrip("/")
    if name == plain or name.startswith(f"{plain}/"):
        return True
    last = name.rpartition("/")[2]
    if not _WILD & set(plain):
        return "/" not in plain and last == plain
    # Use fnmatchcase, because fnmatch ignores case on some systems. In both functions, `*` also matches `/`.
    return fnmatchcase(name, plain) or ("/" not in plain and fnmatchcase(last, plain))


def _is_there(file: RunFile, path: Path) -> bool:
    try:
        mine, theirs = os.stat(path), os.stat(file.path)
        if not stat.S_ISREG(mine.st_mode) or mine.st_size != theirs.st_size:
            return False
        # Copies keep their times, so equal times save reading large files. If the times differ, compare the bytes.
        return mine.st_mtime_ns == theirs.st_mtime_ns or filecmp.cmp(path, file.path, shallow=False)
    except OSError:
        return False
