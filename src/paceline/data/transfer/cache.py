"""The data cache: store files on this machine, kept for later runs.

    <cache>/objects/ab/<key>          whole files, mode 0444; key: a hash of store, path and version
    <cache>/partial/<key>.part        files being fetched (see module `partial`)
    <cache>/views/<run id>/<node>/    folders of runs: hard links into objects/
    <cache>/views/.held/<run id>      locked by the run until it ends

The modification time of a whole file is a fixed value, so a file that a script has modified is detected without an
index. Its access time is its last use. A file that a view links to has a link count above 1 and is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.stores.filesystem import working_path
from paceline.data.transfer.partial import Partial
from paceline.errors import DataError
from paceline.system import locks, processes
from paceline.system.files import gone_is_fine, is_at, names_in, remove_tree
from paceline.system.units import size_bytes

FOLDER_VARIABLE = "PACELINE_DATA_CACHE"
LIMIT_VARIABLE = "PACELINE_DATA_CACHE_LIMIT"
#: Default limit of the cache, enough for a few data sets. The limit is also at most half of the disk.
DEFAULT_LIMIT_BYTES = 100 * 10**9
#: Each complete file in the cache has this modification time (2001-09-09), because every file system can store whole seconds.
_STAMP_NS = 10**18
#: Seconds after which a partial file is removed if no fetch has resumed it.
_ABANDONED_S = 7 * 86400
#: Seconds to keep a run's links into the cache if its supervisor is on another machine and no process of the run is on this one.
_UNHELD_S = 86400.0
#: Maximum seconds for which the removal of a dead run's links may hold the run's lock.
_MOMENT_S = 0.03


@dataclass(frozen=True)
class CacheUse:
    """The size of the data cache. linked_bytes: size of files that runs use."""

    files: int
    bytes: int
    linked_bytes: int


class DataCache:
    """A folder that caches files of stores for later runs.

    Files that a run is using stay in the cache, even if the cache grows beyond the limit.

    Args:
        folder: Default: PACELINE_DATA_CACHE, else $XDG_CACHE_HOME/paceline/data.
        limit_bytes: Default: PACELINE_DATA_CACHE_LIMIT, else 100 GB; at most half of the disk.

    Raises:
        DataError: The folder can't be created, or the limit is not a size.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        self.folder = working_path(folder) if folder is not None else _default_folder()
        self.views = self.folder / "views"
        self._objects, self._partial = self.folder / "objects", self.folder / "partial"
        self._held = self.views / ".held"
        try:
            for path in (self._objects, self._partial, self._held):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DataError(
                f"the data cache {str(self.folder)!r} can't be made: {error.strerror}. "
                f"Name another folder with {FOLDER_VARIABLE}."
            ) from error
        self.limit_bytes = _limit(self.folder) if limit_bytes is None else limit_bytes

    def __repr__(self) -> str:
        return f"DataCache({str(self.folder)!r}, limit_bytes={self.limit_bytes})"

    # --- Methods for the cached files

    def key(self, identity: str, path: str, version: str, size: int) -> str:
        """Return a file's cache key. identity: a text that identifies the store."""
        text = "\0".join(("1", identity, path, version, str(size)))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def part(self, key: str) -> Path:
        """Return the path of the partial file for a cache key."""
        return self._partial / f"{key}.part"

    def link(self, key: str, size: int, target: str) -> bool:
        """Hard-link a cached file to `target`. Return False if missing or modified."""
        source = self._path(key)
        try:
            status = os.lstat(source)
            if not _is_untouched(status, size):
                self.forget(key)
                return False
            # Set the access time explicitly: many disks are mounted with noatime. The modification time keeps its fixed value.
            os.utime(source, ns=(time.time_ns(), _STAMP_NS))
            _link_or_copy(source, target)
        except FileNotFoundError:
            return False
        return True

    def has(self, key: str, size: int) -> bool:
        """Return whether the whole file with this key is cached and unmodified."""
        try:
            return _is_untouched(os.lstat(self._path(key)), size)
        except OSError:
            return False

    def keep(self, key: str, partial: Partial, target: str | None = None) -> None:
        """Move a fully downloaded file into the cache, and hard-link it to `target`."""
        path = self._path(key)
        try:
            partial.finish(path, mode=0o444, mtime_ns=_STAMP_NS)
        except FileNotFoundError:
            # Create the folder only after a failure, because a check for each file would cost a system call.
            os.makedirs(os.path.dirname(path), exist_ok=True)
            partial.finish(path, mode=0o444, mtime_ns=_STAMP_NS)
        if target is not None:
            # Another run may evict the file before `target` links to it. The caller then fetches the file again.
            with contextlib.suppress(FileNotFoundError):
                _link_or_copy(path, target)

    def forget(self, key: str) -> None:
        """Remove a file from the cache. Runs keep their hard links to it."""
        with gone_is_fine():
            os.unlink(self._path(key))

    # --- Methods for the size of the cache

    def use(self) -> CacheUse:
        """Return the number and total sizes of the cached files."""
        files = size = linked = 0
        for _, status in self._all():
            files, size = files + 1, size + status.st_size
            linked += status.st_size if status.st_nlink > 1 else 0
        return CacheUse(files, size, linked)

    def prune(
        self,
        limit_bytes: int | None = None,
        *,
        make_room_bytes: int = 0,
        unused_for_s: float = 0.0,
        dry_run: bool = False,
    ) -> int:
        """Remove the least recently used files down to the limit. Return the freed bytes.

        Args:
            limit_bytes: Total size of the files to keep. Default: the cache's own limit.
            make_room_bytes: Free space to leave below the limit.
            unused_for_s: Only remove files that have not been used for this many seconds.
            dry_run: Remove no file, but return the total size of the files that would be removed.
        """
        if not dry_run:
            self.drop_dead_views()
            self._drop_abandoned()
        newest_ns = time.time_ns() - int(unused_for_s * 1e9)
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        entries = sorted(self._all(), key=lambda item: item[1].st_atime_ns)
        excess = sum(status.st_size for _, status in entries) + make_room_bytes - limit
        removed = 0
        for path, status in entries:
            if removed >= excess or (unused_for_s and status.st_atime_ns > newest_ns):
                # The files are sorted by last use, so all following files were used even later: stop.
                break
            with gone_is_fine():
                # Check the number of links again: a run may have linked the file since the listing.
                if os.lstat(path).st_nlink == 1:
                    if not dry_run:
                        path.unlink()
                    removed += status.st_size
        return removed

    def make_room(self, needed_bytes: int) -> None:
        """Try to remove unused files until this many bytes fit below the limit."""
        if needed_bytes > 0:
            self.prune(make_room_bytes=needed_bytes)

    # --- Methods for views, the folders in which a run has its links to cached files

    def view_dir(self, run_id: str, node_rank: int) -> Path:
        """Return the folder for a node's links to cached files of a run."""
        # The run's id becomes a folder name: a slash or ".." would leave the folder.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", run_id):
            raise DataError(f"the run id {run_id!r} can't be the name of a folder.")
        return self.views / run_id / str(node_rank)

    def hold_view(self, run_id: str) -> int:
        """Protect a run's links to cached files until the returned fd is closed."""
        # `view_dir` raises if the id is invalid.
        assert self.view_dir(run_id, 0)
        path = self._held / run_id
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Take a shared lock, because several supervisors of this machine may hold it. The kernel releases
            # the lock when a process ends, even if it was killed.
            fcntl.flock(fd, fcntl.LOCK_SH)
            # `drop_dead_views` may have unlinked this file after the open. A lock on an unlinked file protects nothing.
            if is_at(path, fd):
                return fd
            os.close(fd)

    def is_unheld(self, run_id: str) -> bool:
        """Return whether no process on this machine holds the run's lock (`hold_view`).

        For a run that has not ended, True means that its supervisor is on another machine.
        """
        assert self.view_dir(run_id, 0)
        # A run holds its lock until its end. `drop_dead_views` holds the lock only for a moment, so wait for this moment.
        fd = locks.take_within(self._held / run_id, _MOMENT_S)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def note_unheld(self, fd: int) -> None:
        """Keep a run's links to cached files after the caller closes `fd`.

        `fd` is from `hold_view`. The links stay for a day, and longer while a process of the run is on this machine.
        """
        os.pwrite(fd, b"node\n", 0)

    def _is_used_unheld(self, fd: int, run_id: str) -> bool:
        noted = os.fstat(fd)
        is_new = time.time() - noted.st_mtime < _UNHELD_S
        return bool(noted.st_size) and (is_new or bool(processes.with_variable("PACELINE_RUN_ID", run_id)))

    def drop_views(self, run_id: str) -> None:
        """Remove a run's links to cached files, but not the cached files."""
        assert self.view_dir(run_id, 0)
        remove_tree(self.views / run_id)
        with gone_is_fine():
            os.truncate(self._held / run_id, 0)  # remove the mark of `note_unheld`, which keeps links without a lock

    def drop_dead_views(self) -> None:
        """Remove links to cached files of runs that have ended."""
        # A killed run may leave a folder of links without a lock file, or a lock file without a folder.
        for name in set(names_in(self.views)) | set(names_in(self._held)):
            if name == ".held":
                continue
            fd = locks.take(self._held / name)
            if fd is None:
                continue  # a living run holds this lock
            # If a removal fails here, the next call tries again.
            with gone_is_fine(), open(fd, "rb"):
                if not self._is_used_unheld(fd, name):
                    remove_tree(self.views / name)
                    # Unlink while holding the lock: a process that waits for it detects the unlink, and creates a new lock file.
                    (self._held / name).unlink(missing_ok=True)

    # --- Helpers of the methods above

    def _path(self, key: str) -> str:
        # Do not use pathlib, because joining takes as long as the system calls on the file.
        return f"{self._objects}/{key[:2]}/{key}"

    def _all(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in names_in(self._objects):
            with gone_is_fine(), os.scandir(self._objects / folder) as entries:
                for entry in entries:
                    with gone_is_fine():
                        yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _drop_abandoned(self) -> None:
        now = time.time()
        for name in names_in(self._partial):
            path = self._partial / name
            with gone_is_fine():
                is_old = now - os.lstat(path).st_mtime > _ABANDONED_S
                # A .ranges file has no lock of its own: the lock of its .part file covers both.
                if is_old and not locks.is_held(path.with_suffix(".part")):
                    path.unlink()


def parse_size(text: str) -> int:
    """Return a size such as "1.5 TiB" in bytes.

    Raises:
        DataError: The text is not a size.
    """
    try:
        return size_bytes(text)
    except ValueError:
        raise DataError(
            f"{text!r} is not a size. Give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB."
        ) from None


def _default_folder() -> Path:
    if named := os.environ.get(FOLDER_VARIABLE):
        return working_path(named)
    return working_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "paceline" / "data"


def _limit(folder: Path) -> int:
    text = os.environ.get(LIMIT_VARIABLE)
    if text:
        try:
            return parse_size(text)
        except DataError as error:
            raise DataError(f"{LIMIT_VARIABLE}: {error}") from None
    return min(DEFAULT_LIMIT_BYTES, shutil.disk_usage(folder).total // 2)


def _is_untouched(found: os.stat_result, size: int) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_mtime_ns == _STAMP_NS and size in (-1, found.st_size)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        # `os.link` never replaces a file, so remove a file that an earlier attempt has left under this name.
        os.unlink(target)
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # The file system has no hard links, or the file has the maximum number of them.
        shutil.copyfile(source, target)
