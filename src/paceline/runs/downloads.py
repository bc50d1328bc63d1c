"""A run's files chosen by name or pattern, and copied out whole or not at all."""

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
from paceline.system.names import some

_WILD = frozenset("*?[")
#: So many names at most in a message.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A file of a run.

    name: as `get_file_names` has it, or "work/..." of what the script left beside itself. path: where it lies, by a way without
    links. top: the run's folder.
    """

    name: str
    path: Path
    size_bytes: int
    top: Path


def files(folder: RunFolder, patterns: Sequence[str] = ()) -> list[RunFile]:
    """The run's files that match one of the patterns, sorted by name; all of them without a pattern.

    A pattern is a name, the name of a folder, for all below it, or has `*`, `?` or `[...]`, which match `/` as well. One
    without a `/` is compared with the last part of names, too: `*.pt` is any such file. What is no file of the run's (a
    pipe, a link that leads nowhere or out of the run) is left out.

    Raises:
        RunNotFoundError: a pattern that no file matches.
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
                f"run {folder.run_id} has no file {pattern!r}. Its files: {some(names, _NAMED) or 'none'}. "
                f"`paceline files {folder.run_id}` shows all."
            )
        chosen.update(found)
    return [file for file in there if file.name in chosen]


def left_out(folder: RunFolder) -> list[str]:
    """The names below the run's folders that are no files of the run's, which `files` leaves out."""
    return artifacts.left_out(folder)


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """The outcome for chosen files. copied: those that are new. same: those that were there already. gone: those that the run,
    which goes on, has removed meanwhile.
    """

    copied: list[RunFile]
    same: list[RunFile]
    gone: list[RunFile]


def download(
    chosen: Sequence[RunFile],
    target: Path,
    *,
    overwrite: bool = False,
    came: Callable[[int, int], None] | None = None,
) -> Downloaded:
    """Copy files to `target`, each under its name there, with its times.

    One that is there already, and the same, stays as it is. Killed in the middle, no part of a file is left under its name.

    overwrite: replace other files of these names. came: called with (bytes, whole files) as they come.

    Raises:
        RunStateError: other files have these names, and overwrite=False; nothing has been copied.
        OSError: no room, or a folder that can't be written.
    """
    same: list[RunFile] = []
    wanted: list[RunFile] = []
    for file in chosen:
        (same if _is_there(file, target / file.name) else wanted).append(file)
    # lexists, for a link that leads nowhere is in the way too.
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
            # Either the file is gone, or a folder of the target's: only the first is no error.
            if file.path.exists():
                raise
            gone.append(file)
    return Downloaded(copied=copied, same=same, gone=gone)


def _files(folder: RunFolder) -> Iterator[RunFile]:
    for name, path in sorted([*artifacts.files(folder), *work_dir.left_files(folder)]):
        # Of a run that goes on, a file may have been removed since it was listed.
        with contextlib.suppress(OSError):
            yield RunFile(name=name, path=path, size_bytes=os.lstat(path).st_size, top=folder.path)


def _matches(name: str, pattern: str) -> bool:
    plain = pattern.removeprefix("./").rstrip("/")
    if name == plain or name.startswith(f"{plain}/"):
        return True
    last = name.rpartition("/")[2]
    if not _WILD & set(plain):
        return "/" not in plain and last == plain
    # fnmatch would fold upper and lower case on some systems; its `*` takes `/` as well, on all.
    return fnmatchcase(name, plain) or ("/" not in plain and fnmatchcase(last, plain))


def _is_there(file: RunFile, path: Path) -> bool:
    try:
        mine, theirs = os.stat(path), os.stat(file.path)
        if not stat.S_ISREG(mine.st_mode) or mine.st_size != theirs.st_size:
            return False
        # Copies keep their times, so that equal ones spare reading two large files; else the bytes decide.
        return mine.st_mtime_ns == theirs.st_mtime_ns or filecmp.cmp(path, file.path, shallow=False)
    except OSError:
        return False
