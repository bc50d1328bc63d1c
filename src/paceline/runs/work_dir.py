"""The workers' working directory: a private copy of the snapshot, in which `outputs` is the run's.

At the end, what the script left there stays, and what came from the snapshot unchanged goes: nothing is lost, and a
thousand runs of one source do not fill the disk with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from paceline.runs.folder import RunFolder
from paceline.system.files import read_json
from paceline.system.links import KEPT


def make(folder: RunFolder) -> Path:
    """Copy the run's snapshot to its working directory, and put the job's own files into it; modes, times and links are kept.

    Raises:
        OSError: no space, or the snapshot is gone.
    """
    source, target = folder.snapshot.resolve(strict=True), folder.work
    beside = target.with_name(f".{target.name}")
    # Both may be left by a supervisor that was killed here, and which its engine starts again.
    for old in (beside, target):
        shutil.rmtree(old, ignore_errors=True)
    _copy(str(source), str(beside))
    for path, text in _files(folder).items():
        given = beside / path
        given.parent.mkdir(parents=True, exist_ok=True)
        if not given.parent.resolve().is_relative_to(beside.resolve()):
            raise OSError(errno.ELOOP, "a link of the source leads out of it", path)
        # In place of what the source has there, and never through a link of the source's.
        given.unlink(missing_ok=True)
        given.write_text(text)
    # Relative, so that it holds wherever the run's folder is seen from, in a container too.
    (beside / "outputs").symlink_to(os.path.join("..", folder.outputs.name))
    # Whole or not at all: a run that its engine starts again goes on with what it finds.
    os.rename(beside, target)
    return target


def clean(folder: RunFolder) -> None:
    """Remove from the working directory what is as it was in the snapshot or in the job; the directory too, if nothing else is
    there."""
    work = folder.work
    if not work.is_dir() or work.is_symlink():
        return
    with contextlib.suppress(OSError):
        rescue_outputs(folder)
        if (folder.work / "outputs").is_symlink():
            (folder.work / "outputs").unlink()
        for path, text in _files(folder).items():
            if _has(work / path, text):
                (work / path).unlink()
        source = folder.snapshot.resolve(strict=True)
        # From below: a folder can go only after what is in it. Links to folders are among the folders, and never followed.
        for directory, folders, files in os.walk(work, topdown=False):
            original = source / os.path.relpath(directory, work)
            # __pycache__ is the interpreter's, written beside the sources while the script ran; nobody looks for results there.
            for name in (*files, *(name for name in folders if os.path.islink(os.path.join(directory, name)))):
                path = os.path.join(directory, name)
                if "__pycache__" in Path(os.path.relpath(directory, work)).parts or _same(path, original / name):
                    os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # only if empty


def rescue_outputs(folder: RunFolder) -> None:
    """Move files of a script that put a folder of its own in the place of the link to the outputs to where they belong.

    No link leads them elsewhere: a script in a container may not write where the supervisor may.

    Raises:
        OSError: no space, or no right to.
    """
    outputs, top = folder.work / "outputs", os.path.realpath(folder.path)
    if outputs.is_symlink() or folder.work.is_symlink():
        return
    for directory, folders, files in os.walk(outputs):
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        for name in (*files, *links):
            target = folder.outputs / os.path.relpath(directory, outputs) / name
            place = os.path.relpath(os.path.realpath(target.parent), top)
            # Asked for the real place, because a link in the run's outputs may lead out of them.
            if not os.path.lexists(target) and place.split(os.sep)[0] in KEPT:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(os.path.join(directory, name), target)


def _files(folder: RunFolder) -> dict[str, str]:
    """The job's own files, by their paths. Of the record as it lies there: a node has a copy of it."""
    record = read_json(folder.record)
    return ((record.get("job") or {}).get("files") or {}) if isinstance(record, dict) else {}


def _has(path: Path, text: str) -> bool:
    try:
        return not path.is_symlink() and path.read_text() == text
    except (OSError, ValueError):
        return False


def _copy(source: str, target: str) -> None:
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                _copy(entry.path, path)
            else:
                found = entry.stat()
                shutil.copyfile(entry.path, path)
                os.chmod(path, stat.S_IMODE(found.st_mode))
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _same(path: str, original: Path) -> bool:
    try:
        mine, theirs = os.lstat(path), os.lstat(original)
    except OSError:
        return False
    if stat.S_ISLNK(mine.st_mode):
        return stat.S_ISLNK(theirs.st_mode) and os.readlink(path) == os.readlink(original)
    # Times were kept when the copy was made, so an equal time means that nobody has written since.
    return (mine.st_size, mine.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
