"""Files of stores on this machine, kept for later runs: each content once, and folders of hard links for runs to see.

    <cache>/objects/ab/<key>          whole files, mode 0444; key: a hash of store, path and version
    <cache>/partial/<key>.part        files that are coming (see `partial`)
    <cache>/views/<run id>/<node>/    what runs see: hard links into objects/
    <cache>/views/.held/<run id>      locked by the run as long as it lives

A whole file's time of change is set to a fixed moment, so a file that a script wrote into is told by its time, with no
index that could be lost. Its time of access says when it was last used. What a view links to has a link count above 1
and is never removed.
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
from paceline.data.transfer.partial import Partial, is_claimed
from paceline.errors import DataError
from paceline.system import locks, processes
from paceline.system.files import names_in, remove_tree
from paceline.system.units import size_bytes

FOLDER_VARIABLE = "PACELINE_DATA_CACHE"
LIMIT_VARIABLE = "PACELINE_DATA_CACHE_LIMIT"
#: A guess: room for a few data sets, but at most half of the disk.
DEFAULT_LIMIT_BYTES = 100 * 10**9
#: The time of change of every whole file: 2001-09-09T01:46:40Z, whole seconds for the coarsest file system.
_STAMP_NS = 10**18
#: Partial files that no fetch went on with for so long are removed.
_ABANDONED_S = 7 * 86400
#: Views of a run whose supervisor is on another machine: so long they count as in use where no process of the run is seen.
_UNHELD_S = 86400.0
#: How long whoever removes dead views may have their lock.
_MOMENT_S = 0.03


@dataclass(frozen=True)
class CacheUse:
    """The cache's content in numbers. linked: bytes of files that a run's view has, or that another name keeps."""

    files: int
    bytes: int
    linked_bytes: int


class DataCache:
    """The cache in a folder. folder: default PACELINE_DATA_CACHE, else $XDG_CACHE_HOME/paceline/data.

    limit_bytes: default PACELINE_DATA_CACHE_LIMIT ("100GB"), else 100 GB, at most half of the disk. What runs use now may
    be more than that; it is not taken from under them.

    Raises:
        DataError: the folder can't be made, or the limit is no size.
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

    # --- files

    def key(self, identity: str, path: str, version: str, size: int) -> str:
        """The name of a file's content. identity: of its store."""
        text = "\0".join(("1", identity, path, version, str(size)))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def part(self, key: str) -> Path:
        """The name under which a file grows."""
        return self._partial / f"{key}.part"

    def link(self, key: str, size: int, target: str) -> bool:
        """Give the whole file this name too; False where it is not here, or was written into since it came.

        size: -1 for any.
        """
        source = self._path(key)
        try:
            found = os.lstat(source)
            if not _is_untouched(found, size):
                self.forget(key)
                return False
            # Use is noted here, because many disks are mounted so that reading a file does not. The time of change stays the
            # mark of a whole file.
            os.utime(source, ns=(time.time_ns(), _STAMP_NS))
            _link_or_copy(source, target)
        except FileNotFoundError:
            return False
        return True

    def has(self, key: str, size: int) -> bool:
        """True if the whole file is here, as it came."""
        try:
            return _is_untouched(os.lstat(self._path(key)), size)
        except OSError:
            return False

    def keep(self, key: str, partial: Partial, target: str | None = None) -> None:
        """Make the whole file the cache's own. target: gets it too, unless it is pushed out of the cache at once."""
        path = self._path(key)
        try:
            partial.finish(path, mode=0o444, mtime_ns=_STAMP_NS)
        except FileNotFoundError:
            # Made only when it is missing: to look each time would cost a call for every file.
            os.makedirs(os.path.dirname(path), exist_ok=True)
            partial.finish(path, mode=0o444, mtime_ns=_STAMP_NS)
        if target is not None:
            # Another run may have pushed it out between the two. The caller sees that the target is missing, and fetches it
            # again.
            with contextlib.suppress(FileNotFoundError):
                _link_or_copy(path, target)

    def forget(self, key: str) -> None:
        """Remove a file that must come again; whoever has it in a view keeps it."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    # --- size

    def use(self) -> CacheUse:
        """The number of files, and their sizes."""
        files = size = linked = 0
        for _, found in self._all():
            files, size = files + 1, size + found.st_size
            linked += found.st_size if found.st_nlink > 1 else 0
        return CacheUse(files, size, linked)

    def prune(
        self,
        limit_bytes: int | None = None,
        *,
        make_room_bytes: int = 0,
        unused_for_s: float = 0.0,
        dry_run: bool = False,
    ) -> int:
        """Remove the least recently used files until limit and room are kept; how many bytes went.

        make_room_bytes: that shall fit below the limit besides. unused_for_s: only files that nobody used for so long.
        dry_run: remove nothing, only say how much would go.
        """
        if not dry_run:
            self.drop_dead_views()
            self._drop_abandoned()
        newest_ns = time.time_ns() - int(unused_for_s * 1e9)
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        found = sorted(self._all(), key=lambda item: item[1].st_atime_ns)
        excess = sum(status.st_size for _, status in found) + make_room_bytes - limit
        removed = 0
        for path, status in found:
            if removed >= excess or (unused_for_s and status.st_atime_ns > newest_ns):
                # All that follow were used later than this one.
                break
            with contextlib.suppress(OSError):
                # Again: since it was listed, a run may have linked it.
                if os.lstat(path).st_nlink == 1:
                    if not dry_run:
                        path.unlink()
                    removed += status.st_size
        return removed

    def make_room(self, needed_bytes: int) -> None:
        """Let so many bytes fit below the limit, as far as unused files can be removed for them."""
        if needed_bytes > 0:
            self.prune(make_room_bytes=needed_bytes)

    # --- views

    def view_dir(self, run_id: str, node_rank: int) -> Path:
        """The folder of what one node of a run sees."""
        # The id becomes a folder's name: with a slash, or as "..", it would lead elsewhere.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", run_id):
            raise DataError(f"the run id {run_id!r} can't be the name of a folder.")
        return self.views / run_id / str(node_rank)

    def hold_view(self, run_id: str) -> int:
        """An open file by which the run's views live; close it, or die, and anybody may remove them."""
        # For its check of the id.
        assert self.view_dir(run_id, 0)
        path = self._held / run_id
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Shared: each node's supervisor on this machine may hold it. The kernel gives the lock back when the process ends,
            # however that is, so views of the dead can be told from those in use.
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                # Whoever removes dead views may have removed this very file between the two calls above: a lock on a file
                # without a name holds nothing.
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)

    def is_unheld(self, run_id: str) -> bool:
        """Whether no process of this machine holds the run's views: its supervisor is on another one."""
        assert self.view_dir(run_id, 0)
        # Whoever holds it, holds it for the whole run; one that removes dead views has it for a moment alone.
        fd = locks.take_within(self._held / run_id, _MOMENT_S)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def note_unheld(self, fd: int) -> None:
        """Note that a run's views are used here while nobody holds them. fd: the open file by which they were held so far.

        Such views count as in use while a process of the run is on this machine, and for a day after they were filled.
        """
        os.pwrite(fd, b"node\n", 0)

    def _is_used_unheld(self, fd: int, run_id: str) -> bool:
        noted = os.fstat(fd)
        if not noted.st_size:
            return False
        return time.time() - noted.st_mtime < _UNHELD_S or bool(processes.with_variable("PACELINE_RUN_ID", run_id))

    def drop_views(self, run_id: str) -> None:
        """Remove what the run saw; the files stay in the cache."""
        assert self.view_dir(run_id, 0)
        remove_tree(self.views / run_id)
        with contextlib.suppress(OSError):
            os.truncate(self._held / run_id, 0)  # what `note_unheld` said is over

    def drop_dead_views(self) -> None:
        """Remove the views of runs that are over."""
        # A run that was killed may have left a view without a lock's file, or the file without a view.
        for name in set(names_in(self.views)) | set(names_in(self._held)):
            if name == ".held":
                continue
            fd = locks.take(self._held / name)
            if fd is None:
                continue  # a living run holds it
            # What can't be removed, the next one tries.
            with contextlib.suppress(OSError), open(fd, "rb"):
                if not self._is_used_unheld(fd, name):
                    remove_tree(self.views / name)
                    # Under the lock: who opened the file meanwhile sees that it is gone, and makes another.
                    (self._held / name).unlink(missing_ok=True)

    # --- helpers

    def _path(self, key: str) -> str:
        # Not joined by pathlib: it takes as long as the system calls on the file.
        return f"{self._objects}/{key[:2]}/{key}"

    def _all(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in names_in(self._objects):
            with contextlib.suppress(OSError), os.scandir(self._objects / folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _drop_abandoned(self) -> None:
        now = time.time()
        for name in names_in(self._partial):
            path = self._partial / name
            with contextlib.suppress(OSError):
                # A .ranges file goes by the lock of its .part.
                is_old = now - os.lstat(path).st_mtime > _ABANDONED_S
                if is_old and not is_claimed(path.with_suffix(".part")):
                    path.unlink()


def parse_size(text: str) -> int:
    """Bytes of a size such as "100GB", "1.5 TiB" or "1000".

    Raises:
        DataError: it is none.
    """
    try:
        return size_bytes(text)
    except ValueError:
        raise DataError(
            f"{text!r} is no size. Give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB."
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
        # `os.link` never replaces; the name may be left of an earlier try.
        os.unlink(target)
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system without hard links, or a file that has as many as it may have.
        shutil.copyfile(source, target)
