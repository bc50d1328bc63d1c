"""Files kept by content: copied and hashed in one pass, and a further name of what is there already.

    <models>/.blobs/<size>/<sha256>         whole files, mode 0444, with a time of change that is the same for all
    <models>/.blobs/<size>/<sha256>-<uid>   the same, of another user than the first, who may not link that one's

A version's files are hard links to blobs, so the kernel counts who needs one: a blob with one name is nobody's any more.
A whole file's time of change is fixed, so that a file that somebody wrote into is told by its time.

A source may be changed by its owner at any time, so it is never linked. On a file system that can (btrfs, XFS), a clone takes
the place of the copy, and shares its space until one of the two is changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelError
from paceline.models.sources import ModelSourceFile

#: The time of change of every kept file: 2001-09-09T01:46:40Z, whole seconds for the coarsest file system.
STAMP_NS = 10**18
#: linux/fs.h: _IOW(0x94, 9, int)
_FICLONE = 0x40049409
#: Large, for each piece costs the two threads a change of who runs; several, lest one wait for the other on a busy machine.
_CHUNK, _CHUNKS = 1 << 21, 8
_SAMPLE = 1 << 16
_TRIES = 3


@dataclass(frozen=True)
class KeptFile:
    """A file that is whole. is_new: whether its content was not there before."""

    sha256: str
    size_bytes: int
    is_new: bool


class _ChangedError(Exception):
    pass


def keep(
    source: ModelSourceFile, blobs: Path, target: Path, came: Callable[[int], object] = lambda size: None
) -> KeptFile:
    """Make `target` a file with the source's content, which shares its space with an equal one that was kept before.

    blobs: the folder of contents. target: of the same file system; its folder is there. came: called with bytes as they are
    read.

    Raises:
        ModelError: the source changed each time it was read.
        OSError: it can't be read, or there is no room; nothing is left at `target`.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(_ChangedError):
            return _keep(source, blobs, target, came)
        target.unlink(missing_ok=True)
    raise ModelError(
        f"{str(source.path)!r} changed each of {_TRIES} times it was read. Register it once nothing writes to it any more."
    )


def take(blobs: Path, size_bytes: int, sha256: str, target: Path) -> bool:
    """Make a content that is here, and is read to be sure of it, `target` as well; False where it is not."""
    return _link(blob_path(blobs, size_bytes, sha256), target, size_bytes)


def unneeded(blobs: Path) -> Iterator[tuple[Path, int]]:
    """(path, bytes) of each content that no version has."""
    for path, found in _all(blobs):
        if found.st_nlink == 1:
            yield path, found.st_size


def drop(blob: Path) -> int:
    """Remove a content that no version has; the bytes that this frees.

    A registration that finds it meanwhile makes it a name of its own, and keeps the content by that.
    """
    freed = 0
    for name in _names(blob):
        with contextlib.suppress(OSError):
            found = os.lstat(name)
            if found.st_nlink == 1:
                os.unlink(name)
                freed += found.st_size
    with contextlib.suppress(OSError):
        blob.parent.rmdir()
    return freed


def blob_path(blobs: Path, size_bytes: int, sha256: str) -> Path:
    """The place of a content, there or not."""
    return blobs / str(size_bytes) / sha256


def is_untouched(found: os.stat_result, size_bytes: int) -> bool:
    """True if a kept file is, by its size and its time, as it was when it came."""
    return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes and found.st_mtime_ns == STAMP_NS


def sha256_of(path: Path, came: Callable[[int], object] = lambda size: None) -> str:
    """SHA-256 of a file, in hex.

    Raises:
        OSError: it can't be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb", buffering=0) as file:
        return _hash(file.fileno(), came)


def _keep(source: ModelSourceFile, blobs: Path, target: Path, came: Callable[[int], object]) -> KeptFile:
    fd = source.open()
    try:
        before = os.fstat(fd)
        sha256 = whole = None
        # What looks like a content that is there is hashed alone, so that it needs no room a second time. Else, or where the
        # look was deceived, the one pass copies.
        if (alike := _alike(fd, before.st_size, blobs)) is not None:
            sha256, whole = _hash_both(fd, alike, came)
            os.lseek(fd, 0, os.SEEK_SET)
        is_new = sha256 is None or not _link(blob_path(blobs, before.st_size, sha256), target, before.st_size, whole)
        if is_new:
            sha256 = _copy(fd, target, came)
        # By the open file, not by its path: its hash must be that of a state that it had.
        if _stamp(os.fstat(fd)) != _stamp(before):
            raise _ChangedError
    finally:
        os.close(fd)
    assert sha256 is not None
    if is_new:
        is_new = _share(blob_path(blobs, before.st_size, sha256), target, before.st_size)
    return KeptFile(sha256=sha256, size_bytes=before.st_size, is_new=is_new)


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    # Not the time of change of the inode: a further name of it changes that as well.
    return found.st_ino, found.st_size, found.st_mtime_ns


def _alike(fd: int, size: int, blobs: Path) -> Path | None:
    """A kept content of this size that begins, goes on in the middle, and ends as this file does."""
    try:
        names = os.listdir(blobs / str(size))
    except OSError:
        return None
    mine = _samples(fd, size)
    for name in names:
        with contextlib.suppress(OSError):
            other = os.open(blobs / str(size) / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _samples(other, size) == mine:
                    return blobs / str(size) / name
            finally:
                os.close(other)
    return None


def _samples(fd: int, size: int) -> list[bytes]:
    return [os.pread(fd, _SAMPLE, max(0, at)) for at in (0, size // 2, size - _SAMPLE)]


def _hash(fd: int, came: Callable[[int], object]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    while size := os.readv(fd, [buffer]):
        digest.update(buffer[:size])
        came(size)
    return digest.hexdigest()


def _hash_both(fd: int, blob: Path, came: Callable[[int], object]) -> tuple[str, Path | None]:
    """(the open file's hash, the kept content if it has the same). Both are read at once: it takes no longer than one."""
    kept: list[str] = []

    def hash_kept() -> None:
        with contextlib.suppress(OSError):  # gone by now, or a disk that can't read it: it is no whole content then
            kept.append(sha256_of(blob))

    other = threading.Thread(target=hash_kept, name="paceline-model-hash")
    other.start()
    try:
        sha256 = _hash(fd, came)
    finally:
        other.join()
    return sha256, blob if kept == [sha256] else None


def _copy(fd: int, target: Path, came: Callable[[int], object]) -> str:
    """Copy an open file and return its hash: that of the copy, whatever happens to the source meanwhile."""
    # Readable, for a clone is hashed where it lies.
    out = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        sha256 = _hash(out, came) if _clone(fd, out) else _pump(fd, out, came)
        os.fchmod(out, 0o444)
        os.utime(out, ns=(STAMP_NS, STAMP_NS))
        return sha256
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        os.close(out)


def _clone(fd: int, out: int) -> bool:
    try:
        fcntl.ioctl(out, _FICLONE, fd)
        return True
    except OSError:
        return False


def _pump(fd: int, out: int, came: Callable[[int], object]) -> str:
    """Read each piece once; one thread writes it and another hashes it, for both let others run meanwhile.

    reader and writer   piece 0 1 2 3 ...
    hasher                    0 1 2 ...
    """
    digest = hashlib.sha256()
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
    for _ in range(_CHUNKS):
        free.put(memoryview(bytearray(_CHUNK)))

    def hash_them() -> None:
        while (piece := full.get()) is not None:
            buffer, size = piece
            digest.update(buffer[:size])
            free.put(buffer)

    hasher = threading.Thread(target=hash_them, name="paceline-model-hash")
    hasher.start()
    try:
        while True:
            buffer = free.get()
            size = os.readv(fd, [buffer])
            if not size:
                break
            full.put((buffer, size))
            done = 0
            while done < size:
                # A disk that is nearly full takes a part, and says why with the next.
                done += os.write(out, buffer[done:size])
            came(size)
    finally:
        full.put(None)
        hasher.join()
    return digest.hexdigest()


def _link(blob: Path, target: Path, size: int, whole: Path | None = None) -> bool:
    """Make a kept content `target` as well; False where there is none, or it is another by now. whole: one that was just read.

    Every byte of it is read: a disk loses some without a trace in its size or time.
    """
    for name in _names(blob):
        try:
            if not is_untouched(os.lstat(name), size) or (name != whole and sha256_of(name) != blob.name):
                # Whoever has it keeps it, and `verify` tells of it; the next one gets a whole one.
                os.unlink(name)
                continue
            os.link(name, target, follow_symlinks=False)
            return True
        except OSError:
            continue  # none there, another user's, or a file system without hard links
    return False


def _share(blob: Path, copy: Path, size: int) -> bool:
    """Let a new copy be the content that others find; True unless that was there, and the copy is a name of it now."""
    beside = copy.with_name(f".{copy.name[:100]}.{os.urandom(4).hex()}")
    for name in _names(blob) * _TRIES:
        try:
            blob.parent.mkdir(parents=True, exist_ok=True)
            # The caller's own second name of an inode, not a copy: a reader of blobs finds whole ones alone.
            os.link(copy, name, follow_symlinks=False)
            return True
        except FileExistsError:
            if _link(blob, beside, size):
                os.replace(beside, copy)
                return False
        except FileNotFoundError:
            continue  # somebody has removed the empty folder
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                return True  # without hard links, each version has a copy of its own
            raise
    return True


def _names(blob: Path) -> list[Path]:
    """The names that a content may have: Linux lets nobody link another user's file, so each user may have one."""
    return [blob, blob.with_name(f"{blob.name}-{os.geteuid()}")]


def _all(blobs: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        sizes = sorted(os.listdir(blobs))
    except OSError:
        return
    for size in sizes:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(blobs / size)):
                with contextlib.suppress(OSError):
                    yield blobs / size / name, os.lstat(blobs / size / name)
