"""Hash a scanned source folder, and copy it to `<workspace>/snapshots/<hash>/` unless that exists.

A snapshot never changes. Runs work on copies of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.errors import SnapshotError
from paceline.snapshot.scan import Tree, scan, stamp_of
from paceline.system.files import gone_is_fine, write_json
from paceline.system.linked import NotCopied

_CHUNK = 1 << 20
_TRIES = 3

#: A function that is called with (bytes done, total bytes) while files are hashed and copied.
Progress: TypeAlias = "Callable[[int, int], None]"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """An unchanging copy of a source folder in the workspace."""

    id: str
    path: Path
    file_count: int
    size: int
    is_new: bool
    files: frozenset[str]
    not_copied: tuple[NotCopied, ...] = ()


def check_folder(source: Path) -> None:
    """Raise SnapshotError unless the source is a folder."""
    if not source.is_dir():
        raise SnapshotError(f"source_directory {str(source)!r} is not a folder. Name the folder that holds the script.")


def take(
    source: Path,
    snapshots_dir: Path,
    workspace_dir: Path,
    progress: Progress | None = None,
    leave_out: Sequence[Path] = (),
    opened: frozenset[str] | None = None,
    wanted: frozenset[str] = frozenset(),
    is_whole: bool = False,
) -> Snapshot:
    """Return a snapshot of `source`. Copy the files unless an equal snapshot exists.

    Args:
        source: The folder to copy.
        snapshots_dir: `<workspace>/snapshots`.
        workspace_dir: The workspace, which is excluded.
        progress: Called repeatedly while files are read.
        leave_out: Files and folders to exclude.
        opened: Relative paths to copy even if an ignore rule excludes them; None if no file may be replaced by a link.
        wanted: Relative paths of folders with earlier runs' results, to which the run gets links.
        is_whole: Whether to copy all files, also beyond the limits and against ignore files.

    Raises:
        SnapshotError: The source is not a folder, exceeds the limits or has a link to a path outside of it. Or a file
            is unreadable or keeps changing, or the disk is full.
    """
    check_folder(source)
    cache_dir = snapshots_dir / ".scans"
    cache_file = cache_dir / f"{hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:32]}.json"
    for attempt in range(_TRIES):
        tree = scan(source, cache_file, workspace_dir, leave_out, opened, wanted, is_whole)
        unchanged = len(tree.hashes) == len(tree.files)
        try:
            meter = _Meter(tree, progress)
            for path in tree.files:
                if path not in tree.hashes:
                    tree.hashes[path] = _read(tree, path, None, meter)
            snapshot_id = _tree_hash(tree)
            target = snapshots_dir / snapshot_id
            # A complete folder is renamed to this name, so an existing folder is complete.
            is_new = not target.is_dir()
            if is_new:
                _copy(tree, target, meter)
            break
        except _ChangedError as change:
            if attempt == _TRIES - 1:
                raise SnapshotError(
                    f"{change.path!r} in {str(source)!r} changed each of {_TRIES} times it was read. "
                    "Stop the program that writes to it, or name it in .amlignore."
                ) from None
        except OSError as error:
            raise SnapshotError(
                f"the snapshot of {str(source)!r} could not be made: {error.strerror}: {error.filename!r}. "
                "Fix that, or name the file in .amlignore."
            ) from error
    # Mark the snapshot as used before a record refers to it.
    with gone_is_fine():
        os.utime(target)
    if not unchanged or tree.last_id != snapshot_id:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            write_json(cache_file, tree.to_cache(snapshot_id))
        except OSError:
            pass  # without the cache, the next scan hashes all files again
    return Snapshot(
        id=snapshot_id,
        path=target,
        file_count=len(tree.files) + len(tree.links),
        size=tree.size,
        is_new=is_new,
        files=frozenset(tree.files) | frozenset(tree.links),
        not_copied=tuple(tree.not_copied),
    )


class _ChangedError(Exception):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _Meter:
    def __init__(self, tree: Tree, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self.total = sum(stamp[0] for path, stamp in tree.files.items() if path not in tree.hashes)

    def add(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, max(self.total, self._done))


def _read(tree: Tree, path: str, target: Path | None, meter: _Meter) -> str:
    """Return the hash of a file's content. With `target`, copy the content there too."""
    digest = hashlib.sha256()
    try:
        source = open(tree.source / path, "rb", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        raise _ChangedError(path) from None
    with source:
        # Stat the open file, not the path: an editor may have replaced it since the scan.
        if stamp_of(os.fstat(source.fileno())) != tree.files[path]:
            raise _ChangedError(path)
        copy = open(target, "xb", buffering=0) if target is not None else None  # noqa: SIM115
        try:
            while data := source.read(_CHUNK):
                digest.update(data)
                if copy is not None and copy.write(data) != len(data):
                    # Raise an error, because an unbuffered write to a nearly full disk only returns a smaller count.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
                meter.add(len(data))
        finally:
            if copy is not None:
                copy.close()
        # Check the stamp again: if the file was written during the read, the hash may fit no state that the file ever had.
        if stamp_of(os.fstat(source.fileno())) != tree.files[path]:
            raise _ChangedError(path)
    return digest.hexdigest()


def _tree_hash(tree: Tree) -> str:
    digest = hashlib.sha256(b"paceline snapshot 1\0")
    # A letter for the type distinguishes a folder, a file and a link of one name. NUL, which no name has, ends a part.
    for path in sorted(tree.directories):
        digest.update(b"d\0" + os.fsencode(path) + b"\0")
    for path in sorted(tree.files):
        mode = stat.S_IMODE(tree.files[path][4])
        digest.update(b"f\0" + os.fsencode(path) + f"\0{mode:o}\0{tree.hashes[path]}\0".encode())
    for path in sorted(tree.links):
        digest.update(b"l\0" + os.fsencode(path) + b"\0" + os.fsencode(tree.links[path]) + b"\0")
    return digest.hexdigest()


def _copy(tree: Tree, target: Path, meter: _Meter) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".new-{os.getpid()}-{os.urandom(4).hex()}")
    last = target.parent / tree.last_id if tree.last_id else None
    meter.total += tree.size
    try:
        beside.mkdir()
        # The scan lists each folder before its content, so the parent of each folder exists.
        for path in tree.directories:
            (beside / path).mkdir()
        for path, stamp in tree.files.items():
            if last is not None and _link(last / path, beside / path, tree, path):
                continue
            if _read(tree, path, beside / path, meter) != tree.hashes[path]:
                raise _ChangedError(path)
            os.chmod(beside / path, stat.S_IMODE(stamp[4]))
        for path, link in tree.links.items():
            os.symlink(link, beside / path)
        try:
            # Of two concurrent copies the first wins: renaming onto a non-empty folder fails. Readers never see a partial copy.
            os.rename(beside, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _link(old: Path, new: Path, tree: Tree, path: str) -> bool:
    """Hard-link the last snapshot's file `old` to `new`. Return False if changed or impossible."""
    try:
        status = os.lstat(old)
        if stat.S_IMODE(status.st_mode) != stat.S_IMODE(tree.files[path][4]) or status.st_size != tree.files[path][0]:
            return False
        # Hash the old file, because its times prove nothing: a script may have written into a snapshot.
        digest = hashlib.sha256()
        with open(old, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                digest.update(data)
        same = digest.hexdigest() == tree.hashes[path]
        if same:
            os.link(old, new)
        return same
    except OSError:
        return False  # the old file is missing or can't be hard-linked, so the caller copies the file
