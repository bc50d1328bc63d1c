"""Content-addressed storage of model files: new contents are copied, known contents hard-linked.

    <models>/.blobs/<size>/<sha256>         blobs: whole files, mode 0444, all with the same modification time
    <models>/.blobs/<size>/<sha256>-<uid>   a blob of another user, who may not link the first user's blob

Files of versions are hard links to blobs, so the link count is the reference count: a blob with one link is unused. The fixed
modification time shows whether a blob was written to.

The owner of a source file may change it at any time, so a blob is a copy of the source, not a link. On btrfs and XFS, the copy
shares its space with the source until one of them changes.
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
from paceline.system.files import gone_is_fine, names_in, stamp_of

#: Modification time of all registered files (2001-09-09). A file with another time was changed by somebody.
STAMP_NS = 10**18
#: The request FICLONE of linux/fs.h, which clones a file's blocks: _IOW(0x94, 9, int).
_FICLONE = 0x40049409
#: Size and number of chunks. Chunks are large, because each chunk costs a switch between two threads. There are several chunks,
#: so that neither thread has to wait for the other thread on a busy machine.
_CHUNK, _CHUNKS = 1 << 21, 8
_SAMPLE = 1 << 16
_TRIES = 3


@dataclass(frozen=True)
class KeptFile:
    """A stored model file. is_new: whether the content was not stored before."""

    sha256: str
    size_bytes: int
    is_new: bool


class _ChangedError(Exception):
    pass


def keep(
    source: ModelSourceFile, blobs: Path, target: Path, on_read: Callable[[int], object] = lambda size: None
) -> KeptFile:
    """Store a file's content once, and hard-link `target` to it. Return hash and size.

    Args:
        source: The file to read.
        blobs: The folder of all blobs.
        target: A path on the same file system, in an existing folder.
        on_read: Called with the number of bytes read.

    Raises:
        ModelError: The source changed each time it was read.
        OSError: The source can't be read, or the disk is full. Nothing is left at `target`.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(_ChangedError):
            return _keep(source, blobs, target, on_read)
        target.unlink(missing_ok=True)
    raise ModelError(
        f"{str(source.path)!r} changed each of {_TRIES} times it was read. Register it once nothing writes to it any more."
    )


def take(blobs: Path, size_bytes: int, sha256: str, target: Path) -> bool:
    """Hard-link a stored file to `target`. Return False if missing or damaged."""
    return _link(blob_path(blobs, size_bytes, sha256), target, size_bytes)


def unneeded(blobs: Path) -> Iterator[tuple[Path, int]]:
    """Yield (path, bytes) of each stored file that no model version uses."""
    yield from ((path, status.st_size) for path, status in _all(blobs) if status.st_nlink == 1)


def drop(blob: Path) -> int:
    """Remove a stored file if unused. Return the freed bytes or 0.

    A concurrent registration that uses the file has a separate hard link, so the content stays on the disk.
    """
    freed = 0
    for name in _names(blob):
        with gone_is_fine():
            status = os.lstat(name)
            if status.st_nlink == 1:
                os.unlink(name)
                freed += status.st_size
    with gone_is_fine():
        blob.parent.rmdir()
    return freed


def blob_path(blobs: Path, size_bytes: int, sha256: str) -> Path:
    """Return the path for a stored file, which may not exist."""
    return blobs / str(size_bytes) / sha256


def is_untouched(found: os.stat_result, size_bytes: int) -> bool:
    """Return whether a stored file's size and modification time are unchanged."""
    return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes and found.st_mtime_ns == STAMP_NS


def sha256_of(path: Path, on_read: Callable[[int], object] = lambda size: None) -> str:
    """Return the SHA-256 of a file, in hex.

    Raises:
        OSError: The file can't be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb", buffering=0) as file:
        return _hash(file.fileno(), on_read)


def _keep(source: ModelSourceFile, blobs: Path, target: Path, on_read: Callable[[int], object]) -> KeptFile:
    fd = source.open()
    try:
        # The stamp has no ctime, because a new hard link changes the ctime as well.
        stamp, before = stamp_of(fd), os.fstat(fd)
        sha256 = whole = None
        # First hash a file that resembles a stored file: if both are equal, no copy is needed. Copy and hash any other file in
        # one pass.
        if (alike := _alike(fd, before.st_size, blobs)) is not None:
            sha256, whole = _hash_both(fd, alike, on_read)
            os.lseek(fd, 0, os.SEEK_SET)
        is_new = sha256 is None or not _link(blob_path(blobs, before.st_size, sha256), target, before.st_size, whole)
        if is_new:
            sha256 = _copy(fd, target, on_read)
        # Stat the open file, not the path: the hash must belong to a state of this file.
        if stamp_of(fd) != stamp:
            raise _ChangedError
    finally:
        os.close(fd)
    assert sha256 is not None
    if is_new:
        is_new = _share(blob_path(blobs, before.st_size, sha256), target, before.st_size)
    return KeptFile(sha256=sha256, size_bytes=before.st_size, is_new=is_new)


def _alike(fd: int, size: int, blobs: Path) -> Path | None:
    names = names_in(blobs / str(size))
    mine = _samples(fd, size) if names else []
    for name in names:
        with gone_is_fine():
            other = os.open(blobs / str(size) / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _samples(other, size) == mine:
                    return blobs / str(size) / name
            finally:
                os.close(other)
    return None


def _samples(fd: int, size: int) -> list[bytes]:
    return [os.pread(fd, _SAMPLE, max(0, at)) for at in (0, size // 2, size - _SAMPLE)]


def _hash(fd: int, on_read: Callable[[int], object]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    while size := os.readv(fd, [buffer]):
        digest.update(buffer[:size])
        on_read(size)
    return digest.hexdigest()


def _hash_both(fd: int, blob: Path, on_read: Callable[[int], object]) -> tuple[str, Path | None]:
    """Return an open file's hash, and the stored file `blob` if equal, else None."""
    kept: list[str] = []

    def hash_kept() -> None:
        with gone_is_fine():  # a stored file that was removed or can't be read does not count as equal
            kept.append(sha256_of(blob))

    other = threading.Thread(target=hash_kept, name="paceline-model-hash")
    other.start()
    try:
        sha256 = _hash(fd, on_read)
    finally:
        other.join()
    return sha256, blob if kept == [sha256] else None


def _copy(fd: int, target: Path, on_read: Callable[[int], object]) -> str:
    # Open for reading too, because a clone is hashed in place.
    out = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        sha256 = _hash(out, on_read) if _clone(fd, out) else _pump(fd, out, on_read)
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


def _pump(fd: int, out: int, on_read: Callable[[int], object]) -> str:
    """Copy a file in chunks, while another thread hashes them. Return the SHA-256.

    reader and writer   chunk 0 1 2 3 ...
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
                # On a nearly full disk, `write` writes only a part, and the next call fails.
                done += os.write(out, buffer[done:size])
            on_read(size)
    finally:
        full.put(None)
        hasher.join()
    return digest.hexdigest()


def _link(blob: Path, target: Path, size: int, whole: Path | None = None) -> bool:
    """Hard-link a stored file to `target`. Return False if missing or damaged.

    First verify the stored file's hash, except for the path `whole`, which the caller has verified. Remove a damaged file.
    """
    for name in _names(blob):
        try:
            if not is_untouched(os.lstat(name), size) or (name != whole and sha256_of(name) != blob.name):
                # Remove the damaged copy. Versions with hard links to it keep it, and `verify` reports them.
                os.unlink(name)
                continue
            os.link(name, target, follow_symlinks=False)
            return True
        except OSError:
            continue  # the stored file is missing or another user's, or the file system has no hard links
    return False


def _share(blob: Path, copy: Path, size: int) -> bool:
    """Store a new copy under its hash. Return False if the content existed already."""
    beside = copy.with_name(f".{copy.name[:100]}.{os.urandom(4).hex()}")
    for name in _names(blob) * _TRIES:
        try:
            blob.parent.mkdir(parents=True, exist_ok=True)
            # Hard-link the finished copy to the stored file's name, so that readers never see an incomplete file.
            os.link(copy, name, follow_symlinks=False)
            return True
        except FileExistsError:
            if _link(blob, beside, size):
                os.replace(beside, copy)
                return False
        except FileNotFoundError:
            continue  # another process has removed the empty folder, so create it again
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                return True  # without hard links, each version has its own copy
            raise
    return True


def _names(blob: Path) -> list[Path]:
    """Return a stored file's possible paths: shared, and for this user."""
    return [blob, blob.with_name(f"{blob.name}-{os.geteuid()}")]


def _all(blobs: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for size in names_in(blobs):
        for name in names_in(blobs / size):
            with gone_is_fine():
                yield blobs / size / name, os.lstat(blobs / size / name)
