"""Read and write files safely while other processes use them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.system.links import open_below

#: Mode of files that only their owner may read.
PRIVATE = 0o600
#: Mode of files that only their owner may write, also in a folder shared by a group.
OWNED = 0o644
#: ioctl of Linux that shares the blocks of another file until one of the files is written (ioctl_ficlone(2)).
_FICLONE = 0x40049409


def state_folder() -> Path:
    """Return Paceline's folder below this user's XDG_STATE_HOME."""
    named = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification requires programs to ignore a relative path.
    return Path(named if os.path.isabs(named) else os.path.expanduser("~/.local/state"), "paceline")


def is_mine(path: Path) -> bool:
    """Return whether a file belongs to this user or root; False if missing.

    In a workspace that a group shares, a file belongs to the member who has replaced it last.
    """
    try:
        return os.lstat(path).st_uid in (os.geteuid(), 0)
    except OSError:
        return False


def write_whole(path: Path, text: str, *, sync: bool = False, mode: int = 0o666) -> None:
    """Replace the content of `path` atomically: readers see the old or the new text.

    sync: Also flush the file to the disk, so that it survives a power cut.
    mode: Permissions of the file, before the umask.
    """
    with replacing(path, f".{path.name}.{os.getpid()}.") as beside:
        # The new file has a random name, and its final mode from the start.
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, begins: str = ".new-") -> Iterator[Path]:
    """Yield a temporary path (prefix `begins`) beside `path`, and rename it to `path` on success."""
    beside = path.with_name(f"{begins}{os.urandom(3).hex()}")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_json(path: Path, value: Any, *, sync: bool = False, mode: int = 0o666) -> None:
    # Don't indent: the indenting encoder is ten times slower, and runs wait for it at each change of state.
    write_whole(path, json.dumps(value) + "\n", sync=sync, mode=mode)


def copy_whole(
    source: Path, target: Path, came: Callable[[int, int], None] | None = None, *, top: Path | None = None
) -> None:
    """Copy a file atomically, with times and permissions.

    came: Called with the numbers of bytes and files copied since the last call of `came`.
    top: A folder above the source. A link between `top` and the source is an error: another user may have made it.
    """
    fd = None if top is None else open_below(os.fspath(top), source.relative_to(top).as_posix())
    with open(source if fd is None else fd, "rb") as original:
        target.parent.mkdir(parents=True, exist_ok=True)
        begins = f".{target.name[:100]}."
        with replacing(target, begins) as beside, _unnamed(target.parent, beside) as (file, name_it):
            while data := original.read(1 << 20):
                file.write(data)
                if came is not None:
                    came(len(data), 0)
            file.flush()
            found = os.fstat(original.fileno())
            os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode) & 0o777)
            os.utime(file.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
            name_it()
    if came is not None:
        came(0, 1)


@contextlib.contextmanager
def _unnamed(folder: Path, beside: Path) -> Iterator[tuple[IO[bytes], Callable[[], None]]]:
    """Yield an unnamed file in `folder`, and a function that names the file `beside`.

    If the process ends early, the file vanishes. On NFS, which has no unnamed files, the file is at `beside` at once.
    """
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        with open(beside, "xb") as file:
            yield file, lambda: None
        return
    with open(fd, "wb") as file:
        # Pass `src_dir_fd`, because linkat(2) follows the link only if it gets a folder descriptor.
        yield file, lambda: os.link(f"/proc/self/fd/{fd}", beside, src_dir_fd=fd, follow_symlinks=True)


def copy_tree(source: Path, target: Path) -> None:
    """Copy the content of a folder into another folder, with times and permissions.

    Links are copied as links. On Btrfs and XFS, a copy shares its disk blocks with the original until one file changes.

    Raises:
        OSError: A file can't be read or written; files copied so far stay.
    """
    shutil.copytree(source, target, symlinks=True, copy_function=copy_file, dirs_exist_ok=True)


def copy_file(source: str, target: str) -> None:
    """Copy a file with time and permissions, sharing its blocks if possible."""
    try:
        with open(source, "rb") as original, open(target, "wb") as copy:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
    except OSError:
        # The target is on another file system, or the file system can't share blocks.
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def remove_tree(path: Path) -> None:
    """Remove a file or folder, if it exists, without following links.

    Raises:
        OSError: A part, such as another user's file, can't be removed. All other parts are removed.
    """
    failed: list[OSError] = []

    def again(function: Callable[..., Any], name: str, error: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            try:
                if Path(name) != path:  # don't change the mode of the folder that contains the tree
                    os.chmod(os.path.dirname(name), stat.S_IRWXU)
                if function in (os.open, os.scandir, os.listdir):
                    os.chmod(name, stat.S_IRWXU)
                    remove_tree(Path(name))
                else:
                    function(name)
            except FileNotFoundError:
                raise
            except OSError as reason:
                failed.append(reason)

    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        # Python 3.12 renamed the argument `onerror`.
        handler: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": again}
        shutil.rmtree(path, **handler)
    if failed:
        raise failed[0]


def tree_size(path: Path | str) -> int:
    """Return the total bytes of all files below a folder, without symbolic links.

    Several hard links to a file count once. Unreadable and vanished files count as 0 bytes.
    """
    total, folders, seen = 0, [os.fspath(path)], set()
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        if found.st_nlink > 1:
                            if (found.st_dev, found.st_ino) in seen:
                                continue
                            seen.add((found.st_dev, found.st_ino))
                        total += found.st_size
    return total


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder; [] if missing or unreadable."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def gone_is_fine() -> contextlib.suppress:
    """Return a context manager that suppresses OSError, as from a removed file."""
    return contextlib.suppress(OSError)


def stamp_of(file: Path | str | int) -> tuple[int, int, int] | None:
    """Return (size, modification time in ns, inode) of a path or fd; None if gone.

    Two writes within one clock tick differ in the inode, because `replacing` creates a new file for each write.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def changed_at(path: Path) -> float:
    """Return a file's modification time in seconds since 1970, or 0 if gone."""
    stamp = stamp_of(path)
    return stamp[1] / 1e9 if stamp else 0.0


def age_s(path: Path) -> float:
    """Return the seconds since a path's modification, or 0 if it is unreadable."""
    stamp = stamp_of(path)
    return time.time() - stamp[1] / 1e9 if stamp else 0.0


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_if_possible(path: Path) -> None:
    """Flush a file or folder to the disk, if its file system can."""
    with contextlib.suppress(OSError):
        sync_file(path)


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_at(path: Path | str, fd: int) -> bool:
    """Return whether a path still leads to the open file `fd`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def walk_files(
    top: Path, enters: Callable[[os.DirEntry[str]], bool] = lambda entry: True
) -> Iterator[tuple[str, os.DirEntry[str], bool]]:
    """Yield (name below `top`, entry, is_file) for each entry that is not a folder.

    Follow links, except links to a folder that contains them. `is_file` is False for broken links and special files.

    enters: Returns whether to list the content of a folder.

    Raises:
        OSError: A folder can't be read.
    """
    # Folders to visit, each with the targets of the links on the way: reaching such a target again is a cycle.
    waiting: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(top),))]
    while waiting:
        inside, above = waiting.pop()
        # Read all entries first: a caller that stops early would leave the folder open.
        with os.scandir(top / inside) as found:
            entries = list(found)
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # for example, the entry is a link to itself
                is_folder = is_file = False
            if not is_folder:
                yield name, entry, is_file
            elif not enters(entry):
                continue
            elif not entry.is_symlink():
                waiting.append((name, above))
            elif (real := os.path.realpath(entry.path)) not in above and not _is_above(real, entry.path):
                waiting.append((name, (*above, real)))


def _is_above(folder: str, path: str) -> bool:
    return f"{os.path.realpath(os.path.dirname(path))}/".startswith(f"{folder.rstrip('/')}/")


def make_own(path: Path) -> None:
    """Create a folder in a public folder such as /tmp, or accept this user's existing folder.

    Raises:
        PermissionError: The path is a link or a file, belongs to another user, or others may write to it.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            what = "is a link, which its owner could turn elsewhere"
        elif found.st_uid != os.geteuid():
            what = f"belongs to another user (number {found.st_uid})"
        elif not stat.S_ISDIR(found.st_mode):
            what = "is not a folder"
        elif found.st_mode & 0o002:
            what = "can be written to by everybody"
        else:
            if found.st_mode & 0o020:
                os.chmod(path, 0o700)  # a umask of 002 has let the group write to the folder
            return
        raise PermissionError(
            f"{str(path)!r} {what}, so nothing is put there. Remove it, or let its owner or an administrator do so."
        ) from None


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`, or None if missing or incomplete."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # deeply nested JSON raises RecursionError
        return None


def append_line(path: Path, value: Any) -> None:
    """Append a JSON line in one write, so concurrent lines never mix."""
    line = json.dumps(value).encode() + b"\n"
    # With O_APPEND, the kernel seeks to the end and writes in one step.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Terminate a line that a full disk or a SIGKILL has cut short.
        if _ends_torn(path):
            line = b"\n" + line
        if (written := os.write(fd, line)) != len(line):
            os.write(fd, line[written:])  # a full disk cuts a write short; the next write raises
    finally:
        os.close(fd)


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON lines file's complete lines, if it exists."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.split(b"\n"):
        if line:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue


def _ends_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class OwnFolder:
    """An open folder of this user, which stays the same if others replace its path.

    shut: Whether to refuse a folder if the folder or its parent is accessible to other users.

    Raises:
        OSError: The folder or its parent is a link, belongs to another user, or (with `shut`) is accessible to others.
    """

    def __init__(self, path: Path, *, shut: bool) -> None:
        self._path = path
        # With O_NONBLOCK, opening a FIFO does not wait for a writer.
        self._flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        flags = os.O_RDONLY | os.O_DIRECTORY | self._flags
        above = os.open(path.parent, flags)
        try:
            self._check(above, shut=shut)
            self._fd = os.open(path.name, flags, dir_fd=above)
        finally:
            os.close(above)
        try:
            self._check(self._fd, shut=shut)
        except BaseException:
            os.close(self._fd)
            raise

    def _check(self, fd: int, *, shut: bool) -> None:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or (shut and found.st_mode & 0o077):
            raise PermissionError(f"{str(self._path)!r} belongs to another user, or is open to others")

    def read(self, name: str) -> bytes:
        """Return the content of a file that this user has written into the folder.

        Raises:
            OSError: The file is missing, is not a regular file, or belongs to another user.
        """
        with open(os.open(name, os.O_RDONLY | self._flags, dir_fd=self._fd), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                raise PermissionError(f"{name!r} in {str(self._path)!r} belongs to another user, or is not a file")
            return file.read()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON value atomically to a file in the folder."""
        beside = f".{name}.{os.urandom(3).hex()}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, PRIVATE, dir_fd=self._fd)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.rename(beside, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def is_there(self) -> bool:
        """Return whether the path still leads to this folder."""
        return is_at(self._path, self._fd)

    def remove(self) -> None:
        """Remove the folder and its files, but no folder that replaced it."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._fd):
                os.unlink(name, dir_fd=self._fd)
            if self.is_there():
                os.rmdir(self._path)

    def close(self) -> None:
        os.close(self._fd)


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


class PathAttribute:
    """A descriptor whose value is `object.path / name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: _Folder, kind: type) -> Path:
        return folder.path / self._name
