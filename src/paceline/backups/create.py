"""Make a backup of a workspace while its runs go on.

    list a run, its state.json first -> hash -> store new contents -> next run -> ... -> list of files -> the backup itself

A run's state.json is read first, so the run's other files are at least as new as its state. The logs of an active run
are stored up to the last whole line. If a file (an old checkpoint) vanishes meanwhile, the backup lists the run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import IO

from paceline.backups import place
from paceline.backups.manifest import KEPT, LATEST_NS, Backup, BackupEntry, is_allowed, is_kept, link_target, to_bytes
from paceline.data.datasets.content import Digests, known_digests
from paceline.data.transfer.blobs import Blobs
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.runs import store as runs_store
from paceline.runs.folder import RunFolder
from paceline.runs.record import user_name, utc_text
from paceline.system import locks
from paceline.system.files import names_in, remove_tree, stamp_of
from paceline.system.links import open_below, special

#: Matches files to which a run's processes only append lines. A backup of a live run stores only complete lines of such files.
_LOG = re.compile(r"runs/[^/]+/(?:(?:metrics|attempts|logs)/.*)?[^/]*\.(?:log|jsonl|txt)")
#: Files up to this size are copied before the upload. Larger files are uploaded directly, and checked for changes afterwards.
_SMALL_BYTES = 1 << 20
#: Upload the temporary copies as soon as there are this many files or bytes.
_BATCH_FILES, _BATCH_BYTES = 512, 256 << 20
_TRIES = 4
_CHUNK = 1 << 20
#: Name of the folder in the workspace for temporary copies of files.
_SPOOL = ".backup"


@dataclass(frozen=True, kw_only=True)
class Created:
    """A new backup, and the changes that it made in the datastore.

    Attributes:
        backup: The new backup.
        stored, stored_bytes: Number and total size of the file contents that the datastore did not have before.
        left_out: (name, reason) of files that are not in the backup.
        removed: Ids of the old backups that `create` removed because of its argument `keep`.
        freed_bytes: Number of bytes that the removal of old backups freed in the datastore.
    """

    backup: Backup
    stored: int
    stored_bytes: int
    left_out: tuple[tuple[str, str], ...] = ()
    removed: tuple[str, ...] = ()
    freed_bytes: int = 0


def create(workspace_dir: Path, source: Source, *, verify: bool = False, keep: int | None = None) -> Created:
    """Store a backup of the workspace.

    The backup becomes visible to readers only after all its files are stored.

    Args:
        workspace_dir: Folder of the workspace.
        source: Datastore, and folder in it, that holds the workspace's backups.
        verify: Whether to read the file contents that the datastore already has, and to store damaged contents again.
        keep: Number of newest backups to keep; older backups are removed afterwards. None keeps all backups.

    Raises:
        DataError: The place is in the workspace, another process works on the backups, or a file keeps changing.
        TransferError: The datastore can't be written.
    """
    with place.open_backups(workspace_dir, source) as backups, _spool(workspace_dir) as spool:
        _check_outside(workspace_dir, backups)
        with backups.locked() as check_lock, known_digests() as digests:
            blobs = backups.blobs()
            copy = _Copy(workspace_dir, blobs, digests, spool, verify=verify)
            for unit in _units(workspace_dir):
                copy.add_unit(unit)
            copy.flush()
            digests.keep()
            blobs.refresh()
            files = [entry for entry in copy.entries if entry.kind == "file"]
            if short := [entry.name for entry in files if not blobs.has(entry.sha256, entry.size)]:
                raise DataError(f"{short[0]!r} is not whole in {backups.where}. Make the backup again.")
            now, data = datetime.now(timezone.utc), to_bytes(copy.entries)
            backup = Backup(
                id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}",
                created_utc=utc_text(now),
                created_by=user_name(),
                host=socket.gethostname(),
                workspace=workspace_dir.name,
                files=len(files),
                size_bytes=sum(entry.size for entry in files),
                left_out=len(copy.left_out),
                manifest=hashlib.sha256(data).hexdigest(),
                manifest_bytes=len(data),
            )
            check_lock()
            backups.add(blobs, backup, data)
            old = backups.all()[:-keep] if keep else []
            freed = backups.remove(old, check_lock) if old else 0
    return Created(
        backup=backup,
        stored=copy.stored,
        stored_bytes=copy.stored_bytes,
        left_out=tuple(sorted(copy.left_out.items())),
        removed=tuple(one.id for one in old),
        freed_bytes=freed,
    )


def _check_outside(workspace_dir: Path, backups: place.Backups) -> None:
    if backups.store.kind != "local":
        return
    top, folder = os.path.realpath(workspace_dir), os.path.realpath(backups.store.local(backups.path))
    if f"{folder}/".startswith(f"{top}/"):
        raise DataError(
            f"{folder!r} is in the workspace itself, and would be lost with it. Name a place on another disk or machine."
        )
    if f"{top}/".startswith(f"{folder}/"):
        raise DataError(f"{folder!r} has the workspace in it. Name a folder for the backups alone.")


@contextlib.contextmanager
def _spool(workspace_dir: Path) -> Iterator[Path]:
    """Yield a locked folder for the temporary copies of a backup's files."""
    folder = workspace_dir / _SPOOL
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = locks.take(folder / "lock")
    except OSError as error:
        raise DataError(f"{str(folder)!r} can't be written: {error.strerror}. Copies are made there.") from error
    if fd is None:
        raise DataError("another process makes a backup of this workspace. Wait for its end.")
    try:
        # Remove copies that a killed process may have left.
        remove_tree(folder / "copies")
        (folder / "copies").mkdir()
        yield folder / "copies"
    finally:
        remove_tree(folder / "copies")
        os.close(fd)


def _units(top: Path) -> Iterator[str]:
    # List the runs before the other folders: the backup then has all snapshots, datasets and models that the runs refer to.
    # Leave out later runs, except children such as `RUN_0`, which use the snapshots of their parents.
    runs = set(names_in(top / "runs"))
    for folder in sorted(KEPT, key=lambda name: name == "runs"):
        names = [] if os.path.islink(top / folder) else names_in(top / folder)
        if not names:
            yield folder  # an empty folder; or a link, a file or an unreadable folder, which the backup reports
        for name in names:
            parents = accumulate(name.split("_"), "{}_{}".format)
            if is_kept(f"{folder}/{name}") and (folder != "runs" or not runs.isdisjoint(parents)):
                yield f"{folder}/{name}"


class _Copy:
    """A backup in progress, with the files stored so far.

    left_out: Maps the name of each file that is not in the backup to the reason.
    stored, stored_bytes: Number and total size of the file contents that the datastore did not have before.
    """

    def __init__(self, top: Path, blobs: Blobs, digests: Digests, spool: Path, *, verify: bool) -> None:
        self.entries: list[BackupEntry] = []
        self.left_out: dict[str, str] = {}
        self.stored = self.stored_bytes = 0
        # Resolve symbolic links in the workspace's path once, because the store reads large files directly by this path.
        self._top = Path(os.path.realpath(top))
        self._blobs, self._digests, self._spool, self._verify = blobs, digests, spool, verify
        #: SHA-256 hashes of the file contents that the store already has.
        self._known: set[str] = set()
        self._copies: dict[str, Path] = {}
        self._copied_bytes = 0
        #: SHA-256 -> a large file with this content, and the file's `stamp_of` at the time when the backup computed the hash.
        self._originals: dict[str, tuple[Path, tuple[int, int, int] | None]] = {}

    def add_unit(self, unit: str) -> None:
        """Store a folder of the workspace, such as `runs/ID`, recursively."""
        is_live = unit.startswith("runs/") and not runs_store.has_ended(RunFolder(self._top / unit))
        for attempt in range(_TRIES):
            # Read state.json first. Then no other file in the backup is older than the state that the backup records.
            names = sorted(self._names(unit, is_live), key=lambda name: name != f"{unit}/state.json")
            entries: list[BackupEntry] = []
            has_vanished = False
            for name in names:
                try:
                    for entry in self._entry(name, is_live=is_live):
                        if is_allowed(entry):
                            entries.append(entry)
                        else:
                            self.left_out[name] = f"a {entry.kind} that a restore would refuse at this place"
                except (FileNotFoundError, NotADirectoryError):
                    has_vanished = True
                except OSError as error:
                    self.left_out[name] = f"can't be read: {error.strerror}"
            if not os.path.lexists(self._top / unit):
                return  # this folder was removed meanwhile
            # If a file has vanished, list the folder again: a newer checkpoint has probably replaced the file.
            if self._store_originals() and (not has_vanished or attempt == _TRIES - 1):
                self.entries += entries
                return
        raise DataError(
            f"a file in {unit!r} changed each of {_TRIES} times it was stored. Try again when it is written."
        )

    def flush(self) -> None:
        """Store the temporary copies of files in the datastore, then delete the copies."""
        self._blobs.put(sorted(self._copies.items()))
        self.stored += len(self._copies)
        self.stored_bytes += self._copied_bytes
        self._known |= self._copies.keys()
        for path in self._copies.values():
            path.unlink()
        self._copies, self._copied_bytes = {}, 0

    def _names(self, unit: str, is_live: bool) -> Iterator[str]:
        waiting = [unit]
        while waiting:
            name = waiting.pop()
            # Leave out the working directory of a live run, which is a copy of the run's snapshot.
            if not is_kept(name) or (is_live and name == f"{unit}/work"):
                continue
            yield name
            path = self._top / name
            if path.is_dir() and not path.is_symlink():
                try:
                    waiting += [f"{name}/{below}" for below in sorted(os.listdir(path), reverse=True) if "/" in name]
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.left_out[name] = f"a folder that can't be read: {error.strerror}"

    def _entry(self, name: str, *, is_live: bool) -> list[BackupEntry]:
        """Return the path's backup entry in a list; [] excludes the path."""
        status = os.lstat(self._top / name)
        mode, mtime_ns = stat.S_IMODE(status.st_mode) & 0o777, min(max(0, status.st_mtime_ns), LATEST_NS)
        if stat.S_ISDIR(status.st_mode):
            return [BackupEntry("folder", name, mode, mtime_ns)]
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(self._top / name)
            if os.path.isabs(target):
                target = os.path.relpath(os.path.realpath(target), os.path.dirname(self._top / name))
            inside = link_target(name, target)
            if inside is None:
                self.left_out[name] = f"a link to {target!r}, which is no part of the backup"
                return []
            return [BackupEntry("link", name, mtime_ns=mtime_ns, target=inside)]
        if not stat.S_ISREG(status.st_mode):
            self.left_out[name] = special(status.st_mode)
            return []
        with open(open_below(os.fspath(self._top), name), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size, sha256 = self._content(file, name, status.st_size, is_live=is_live)
        is_shared = status.st_nlink > 1 and not is_live
        return [BackupEntry("file", name, mode, mtime_ns, size, sha256, is_shared=is_shared)]

    def _content(self, file: IO[bytes], name: str, size: int, *, is_live: bool) -> tuple[int, str]:
        limit = _whole_lines(file, size) if is_live and _LOG.fullmatch(name) else None
        if limit is None:
            sha256 = self._digests.of(file)
            if self._has(sha256, size):
                return size, sha256
            if size > _SMALL_BYTES and not is_live:
                self._originals[sha256] = (self._top / name, stamp_of(file.fileno()))
                return size, sha256
        copy = self._spool / secrets.token_hex(8)
        size, sha256 = _copied(file, copy, limit)
        if self._has(sha256, size) or sha256 in self._copies:
            copy.unlink()
            return size, sha256
        self._copies[sha256] = copy
        self._copied_bytes += size
        if len(self._copies) >= _BATCH_FILES or self._copied_bytes >= _BATCH_BYTES:
            self.flush()
        return size, sha256

    def _has(self, sha256: str, size: int) -> bool:
        if sha256 in self._known:
            return True
        if not self._blobs.has(sha256, size, verify=self._verify):
            return False
        self._known.add(sha256)
        return True

    def _store_originals(self) -> bool:
        """Copy large files into the datastore. Return False if a file changed meanwhile."""
        originals, self._originals = self._originals, {}
        if not originals:
            return True
        self._blobs.put([(sha256, path) for sha256, (path, _) in originals.items()], are_plain=True)
        changed = [sha256 for sha256, (path, stamp) in originals.items() if stamp_of(path) != stamp]
        whole = originals.keys() - set(changed)
        self._known |= whole
        self.stored += len(whole)
        self.stored_bytes += sum(os.stat(originals[sha256][0]).st_size for sha256 in whole)
        if changed:
            # These files have changed since the backup computed their hashes, so remove their stored contents, which are wrong.
            self._blobs.refresh()
            self._blobs.remove([sha256 for sha256 in changed if self._blobs.size(sha256)])
        return not changed


def _whole_lines(file: IO[bytes], size: int) -> int:
    """Return the offset after the last whole line in a file's first `size` bytes."""
    at = size
    while at > 0:
        begin = max(0, at - _CHUNK)
        found = os.pread(file.fileno(), at - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


def _copied(file: IO[bytes], copy: Path, limit: int | None) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    with open(copy, "xb") as target:
        while data := file.read(_CHUNK if limit is None else min(_CHUNK, limit - size)):
            digest.update(data)
            target.write(data)
            size += len(data)
    return size, digest.hexdigest()
