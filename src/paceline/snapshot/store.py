"""Hash a scanned tree and copy it to `<workspace>/snapshots/<hash>/`, where no copy with that hash lies yet.

A snapshot is never changed once it has its name; runs work on copies of it.
"""

from __future__ import annotations

import contextlib
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
from paceline.system.files import write_json
from paceline.system.linked import NotCopied

_CHUNK = 1 << 20
_TRIES = 3

#: Called with (bytes done, bytes in all) while files are hashed and copied.
Progress: TypeAlias = "Callable[[int, int], None]"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a source directory. is_new: whether this call made it. not_copied: names of the source that it has not."""

    id: str
    path: Path
    file_count: int
    size: int
    is_new: bool
    files: frozenset[str]
    not_copied: tuple[NotCopied, ...] = ()


def check_folder(source: Path) -> None:
    """Raises:
    SnapshotError: it is no folder.
    """
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
    """The snapshot of `source` as it is now, uncommitted edits included; copied only if there is none like it.

    snapshots_dir: `<workspace>/snapshots`. progress: called as bytes are read. leave_out: files and folders it has not.
    opened, wanted, is_whole: as `scan` takes them, for the source of a run.

    Raises:
        SnapshotError: not a folder, over the limits, a link out of the tree, an unreadable file, one that keeps
            changing while it is read, or no space for the copy.
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
            # A folder of that name is whole, because it gets its name by a rename.
            is_new = not target.is_dir()
            if is_new:
                _copy(tree, target, meter)
            break
        except _ChangedError as change:
            if attempt == _TRIES - 1:
                raise SnapshotError(
                    f"{change.path!r} in {str(source)!r} changed each of {_TRIES} times it was read. "
                    "Stop what writes to it, or name it in .amlignore."
                ) from None
        except OSError as error:
            raise SnapshotError(
                f"the snapshot of {str(source)!r} could not be made: {error.strerror}: {error.filename!r}. "
                "Mend that, or name the file in .amlignore."
            ) from error
    # It is in use from now on, before a record says so.
    with contextlib.suppress(OSError):
        os.utime(target)
    if not unchanged or tree.last_id != snapshot_id:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            write_json(cache_file, tree.to_cache(snapshot_id))
        except OSError:
            pass  # the next scan hashes again, that is all
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
    """Adds up what is read: files that need a hash once, and again if they are copied."""

    def __init__(self, tree: Tree, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self.total = sum(stamp[0] for path, stamp in tree.files.items() if path not in tree.hashes)

    def add(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, max(self.total, self._done))


def _read(tree: Tree, path: str, target: Path | None, meter: _Meter) -> str:
    """The hash of a file, which is copied to `target` on the way if one is given.

    Raises:
        _ChangedError: it is not what the scan saw, before or after.
    """
    digest = hashlib.sha256()
    try:
        source = open(tree.source / path, "rb", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        raise _ChangedError(path) from None
    with source:
        # By the open file, not by its path: an editor may have put another in its place since the scan.
        if stamp_of(os.fstat(source.fileno())) != tree.files[path]:
            raise _ChangedError(path)
        copy = open(target, "xb", buffering=0) if target is not None else None  # noqa: SIM115
        try:
            while data := source.read(_CHUNK):
                digest.update(data)
                if copy is not None and copy.write(data) != len(data):
                    # An unbuffered file takes what still fits on a disk that is nearly full, and says so by the count alone.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
                meter.add(len(data))
        finally:
            if copy is not None:
                copy.close()
        # Looked at again: it may have been written to while it was read, and its hash be that of no state it ever had.
        if stamp_of(os.fstat(source.fileno())) != tree.files[path]:
            raise _ChangedError(path)
    return digest.hexdigest()


def _tree_hash(tree: Tree) -> str:
    """The hash of names, permissions, contents and links, in order of name."""
    digest = hashlib.sha256(b"paceline snapshot 1\0")
    # The letters keep a folder, a file and a link of one name apart; a NUL, which no name has, ends each part.
    for path in sorted(tree.directories):
        digest.update(b"d\0" + os.fsencode(path) + b"\0")
    for path in sorted(tree.files):
        mode = stat.S_IMODE(tree.files[path][4])
        digest.update(b"f\0" + os.fsencode(path) + f"\0{mode:o}\0{tree.hashes[path]}\0".encode())
    for path in sorted(tree.links):
        digest.update(b"l\0" + os.fsencode(path) + b"\0" + os.fsencode(tree.links[path]) + b"\0")
    return digest.hexdigest()


def _copy(tree: Tree, target: Path, meter: _Meter) -> None:
    """Copy the tree beside `target`, then give it its name; an equal copy that came first stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".new-{os.getpid()}-{os.urandom(4).hex()}")
    last = target.parent / tree.last_id if tree.last_id else None
    meter.total += tree.size
    try:
        beside.mkdir()
        # The scan has noted each folder before what is in it.
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
            # Two that copy the same tree at once: a rename onto a folder that is not empty fails, so the first stays, and no
            # reader meets a part.
            os.rename(beside, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _link(old: Path, new: Path, tree: Tree, path: str) -> bool:
    """Share the last snapshot's copy of a file that is the same there, so that a small edit makes a small snapshot."""
    try:
        found = os.lstat(old)
        if stat.S_IMODE(found.st_mode) != stat.S_IMODE(tree.files[path][4]) or found.st_size != tree.files[path][0]:
            return False
        # Hashed, not trusted by its times: somebody may have written into a snapshot.
        digest = hashlib.sha256()
        with open(old, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                digest.update(data)
        same = digest.hexdigest() == tree.hashes[path]
        if same:
            os.link(old, new)
        return same
    except OSError:
        # No such file there, or a file system without hard links: it is copied.
        return False
