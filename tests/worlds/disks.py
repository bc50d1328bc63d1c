"""Simulated disks: real files, with simulated times, in a folder for each disk below the world's folder."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from typing import Any

from tests.worlds.kernel import Kernel

_os = {name: getattr(os, name) for name in dir(os) if not name.startswith("_")}
_open, _flock = io.open, fcntl.flock
#: Bytes on a disk that is not full.
_LARGE = 1 << 40


class Disk:
    """A disk, whose files lie in a folder of the world with the same name.

    free: Bytes that are free. A removed file makes room.
    slow_s: Time of each operation in seconds, at most.
    fails: Share of the writes that fail with an I/O error.
    """

    def __init__(self, name: str) -> None:
        self.name, self.free, self.slow_s, self.fails = name, _LARGE, 0.0, 0.0

    def fill(self) -> None:
        self.free = 0

    def heal(self) -> None:
        self.free, self.slow_s, self.fails = _LARGE, 0.0, 0.0


class Disks:
    """All disks of a world."""

    def __init__(self, kernel: Kernel, root: str) -> None:
        self.kernel, self.prefix = kernel, root.rstrip("/") + "/"
        self.of: dict[str, Disk] = {}
        #: Open file -> its path, for files that were opened for writing.
        self.paths: dict[int, str] = {}

    def find(self, path: Any) -> Disk | None:
        if isinstance(path, int):
            path = self.paths.get(path, "")
        text = os.fsdecode(path) if not isinstance(path, str) else path
        if not text.startswith(self.prefix):
            return None
        name = text[len(self.prefix) :].partition("/")[0]
        return self.of.get(name)

    def gate(self, path: Any, *, writes: bool = False) -> Disk | None:
        """Wait for the disk of a path. Return the disk, or None for other paths. Raise an error if the disk fails."""
        kernel = self.kernel
        if kernel.task is None or (disk := self.find(path)) is None:
            return None
        if disk.slow_s:
            kernel.sleep(kernel.random() * disk.slow_s)
        else:
            kernel.point()
        if writes and disk.fails and kernel.random() < disk.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path if isinstance(path, str) else None)
        return disk

    def room(self, disk: Disk, size: int, path: object = None) -> int:
        """Take up to `size` bytes of the disk, and return how many there were."""
        if size and not disk.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path if isinstance(path, str) else None)
        found = min(size, disk.free)
        disk.free -= found
        return found

    def grown(self, fd: int, size: int, at: int | None = None) -> int:
        """Return the bytes by which a write of `size` bytes makes a file longer."""
        length = _os["fstat"](fd).st_size
        if at is None:
            is_append = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)
            at = length if is_append else _os["lseek"](fd, 0, os.SEEK_CUR)
        return max(0, at + size - length)

    def touch(self, path: Any) -> None:
        """Give a file or folder the simulated time as the time of its last change."""
        at = int(self.kernel.time() * 1e9)
        try:
            if isinstance(path, int):
                _os["utime"](path, ns=(at, at))
            else:
                _os["utime"](path, ns=(at, at), follow_symlinks=False)
        except OSError:
            pass

    def touch_folder(self, path: Any) -> None:
        self.touch(os.path.dirname(os.fsdecode(path)) or ".")

    def forget(self, path: Any) -> None:
        """Free the bytes of a file that is removed or replaced."""
        disk = self.find(path)
        if disk is not None:
            try:
                found = _os["lstat"](path)
            except OSError:
                return
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                disk.free += found.st_size


class Raw(io.FileIO):
    """A file that is open for writing."""

    disks: Disks

    def write(self, data: Any) -> int:
        fd = self.fileno()
        disk = self.disks.gate(fd, writes=True)
        if disk is None:
            return super().write(data)
        view = memoryview(data).cast("B")
        grown = self.disks.grown(fd, len(view))
        found = super().write(view[: len(view) - grown + self.disks.room(disk, grown, self.disks.paths.get(fd))])
        self.disks.touch(fd)
        return found


def patches(disks: Disks) -> dict[tuple[Any, str], Any]:
    """Return the functions that take the place of those of `os`, `io` and `fcntl`."""
    kernel = disks.kernel

    def open_(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if kernel.task is None or not set(mode) & set("wax+"):
            if kernel.task is not None and isinstance(file, (str, os.PathLike)):
                disks.gate(os.fspath(file))
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        path = file if isinstance(file, int) else os.fspath(file)
        disk = disks.gate(path, writes=True)
        if disk is None:
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        is_new = False
        if not isinstance(path, int):
            is_new = not os.path.lexists(path)
            if "w" in mode:
                disks.forget(path)
        raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.disks = disks
        if not isinstance(path, int):
            disks.paths[raw.fileno()] = os.path.abspath(os.fsdecode(path))
            if is_new or "w" in mode:
                disks.touch(raw.fileno())
            if is_new:
                disks.touch_folder(path)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        text = io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)
        text.mode = mode
        return text

    def os_open(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None or kernel.task is None:
            return _os["open"](path, flags, mode, dir_fd=dir_fd)
        name = os.fspath(path)
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        disk = disks.gate(name, writes=bool(flags & os.O_CREAT))
        if disk is None or not writes:
            return _os["open"](path, flags, mode)
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(name)
        if flags & os.O_TRUNC:
            disks.forget(name)
        fd = _os["open"](path, flags, mode)
        disks.paths[fd] = os.path.abspath(name)
        if is_new or flags & os.O_TRUNC:
            disks.touch(fd)
        if is_new:
            disks.touch_folder(name)
        return fd

    def write(fd, data):
        if (end := kernel.fds.get(fd)) is not None:
            kernel.point()
            return end.write(data)
        disk = disks.gate(fd, writes=True)
        if disk is None:
            return _os["write"](fd, data)
        view = memoryview(data)
        grown = disks.grown(fd, len(view))
        found = _os["write"](fd, view[: len(view) - grown + disks.room(disk, grown)])
        disks.touch(fd)
        return found

    def pwrite(fd, data, offset):
        disk = disks.gate(fd, writes=True)
        if disk is None:
            return _os["pwrite"](fd, data, offset)
        view = memoryview(data)
        grown = disks.grown(fd, len(view), offset)
        found = _os["pwrite"](fd, view[: len(view) - grown + disks.room(disk, grown)], offset)
        disks.touch(fd)
        return found

    def renamed(name):
        real = _os[name]

        def rename(src, dst, *, src_dir_fd=None, dst_dir_fd=None):
            if src_dir_fd is None and disks.gate(dst, writes=True) is not None:
                disks.forget(dst)
            real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if kernel.task is not None and dst_dir_fd is None and disks.find(os.fspath(dst)):
                disks.touch_folder(src)
                disks.touch_folder(dst)

        return rename

    def making(name):
        real = _os[name]

        def make(*args, **kwargs):
            path = args[1] if name in ("link", "symlink") else args[0]
            disk = disks.gate(os.fspath(path), writes=True) if kwargs.get("dir_fd") is None else None
            real(*args, **kwargs)
            if disk is not None:
                disks.touch(os.fspath(path))
                disks.touch_folder(os.fspath(path))

        return make

    def removing(name):
        real = _os[name]

        def remove(path, *, dir_fd=None):
            disk = disks.gate(os.fspath(path)) if dir_fd is None else None
            if disk is not None and name != "rmdir":
                disks.forget(path)
            real(path, dir_fd=dir_fd)
            if disk is not None:
                disks.touch_folder(path)

        return remove

    def utime(path, times=None, *, ns=None, dir_fd=None, follow_symlinks=True):
        if times is None and ns is None:
            at = int(kernel.time() * 1e9)
            ns = (at, at)
        if times is not None:
            return _os["utime"](path, times, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        return _os["utime"](path, ns=ns, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    def fsync(fd):
        disks.gate(fd, writes=True)

    def statvfs(path):
        found = _os["statvfs"](path)
        disk = disks.find(os.fspath(path) if not isinstance(path, int) else path)
        if disk is None:
            return found
        blocks = disk.free // found.f_frsize
        return os.statvfs_result((*found[:2], _LARGE // found.f_frsize, blocks, blocks, *found[5:]))

    def close(fd):
        from tests.worlds import descriptors

        if fd in kernel.fds:
            return descriptors.close(fd)
        disks.paths.pop(fd, None)
        holders = kernel.lock_holders.get(fd)
        if holders is not None:
            holders.discard(kernel.process)
            kernel.process.locks.discard(fd)
            if holders:
                return None  # another process has this open file too
            del kernel.lock_holders[fd]
        return _os["close"](fd)

    def flock(fd, operation):
        number = fd if isinstance(fd, int) else fd.fileno()
        kernel.point()
        while True:
            try:
                _flock(number, operation | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
                kernel.sleep(0.01)
        if kernel.task is not None:
            if operation & fcntl.LOCK_UN:
                kernel.process.locks.discard(number)
                kernel.lock_holders.pop(number, None)
            else:
                kernel.process.locks.add(number)
                kernel.lock_holders.setdefault(number, set()).add(kernel.process)

    kernel.unlock = lambda fd: _flock(fd, fcntl.LOCK_UN)
    found: dict[tuple[Any, str], Any] = {(os, "open"): os_open, (os, "write"): write, (os, "pwrite"): pwrite}
    found |= {(os, name): renamed(name) for name in ("rename", "replace")}
    found |= {(os, name): making(name) for name in ("mkdir", "link", "symlink")}
    found |= {(os, name): removing(name) for name in ("unlink", "remove", "rmdir")}
    found |= {(os, "utime"): utime, (os, "fsync"): fsync, (os, "statvfs"): statvfs, (os, "close"): close}
    return found | {(fcntl, "flock"): flock, (io, "open"): open_}
