"""Restore a backup, or one run of it: fetch and verify contents, then move files into the workspace.

    <workspace>/.restoring/contents/<sha256>     fetched contents; after a kill, the next restore uses them
    <workspace>/.restoring/files/...             the files under their names
    <workspace>/.restoring/moving.json           written before the first file is moved into the workspace

Users who can write to the datastore can forge a backup. Therefore the list of files is checked (`manifest`), and no
existing file of the workspace is replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.backups import place
from paceline.backups.manifest import Backup, BackupEntry
from paceline.data.transfer.blobs import Blobs
from paceline.data.transfer.progress import Progress
from paceline.errors import DataError, PacelineError
from paceline.job.data_reference import Source
from paceline.models.keep import sha256_of
from paceline.runs import states
from paceline.runs import store as runs_store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks
from paceline.system.files import read_json, remove_tree, write_json
from paceline.system.names import some

_STAGE = ".restoring"
#: Folders in which a restore keeps existing entries without an error: entries of equal name have equal contents there, or a new
#: workspace needs them to reach the datastore that has the backup.
_STAY = ("snapshots", "datastores", "names", "models/.blobs")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of restoring a backup.

    Attributes:
        folder: The workspace.
        files, size_bytes: Number and size of the restored files.
        ended: Ids of runs that were active when the backup was made. These runs are Failed now.
        kept: Names of existing files that were not replaced, such as "datastores/lab.json".
    """

    backup: Backup
    folder: Path
    files: int
    size_bytes: int
    ended: tuple[str, ...]
    kept: tuple[str, ...]


def restore(
    workspace_dir: Path,
    source: Source,
    backup_id: str | None = None,
    *,
    into: Path | None = None,
    run: str | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Restore a backup.

    Args:
        workspace_dir: The workspace in which the datastore of `source` is registered.
        source: Datastore, and folder in it, that holds the backups.
        backup_id: Id of the backup. None means the newest backup.
        into: The folder that becomes the restored workspace. None means `workspace_dir`.
        run: Id of the only run to restore, with its children and their snapshots. None restores the whole backup.
        progress: Receives the progress of the transfer. None reports no progress.

    Raises:
        DataError: The backup is missing or damaged, or the workspace already has a file that would be restored. Nothing
            is restored.
        TransferError: The datastore can't be read. The next call continues where this call has stopped.
    """
    top = workspace_dir if into is None else into
    with place.open_backups(workspace_dir, source) as backups:
        backup = backups.get(backup_id)
        entries = backups.entries(backup)
        if run is not None:
            entries = _of_run(entries, run, backup)
        with _stage(top) as stage:
            plan = {"backup": backup.id, "run": run}
            moving = read_json(stage / "moving.json")
            if moving is None or moving.get("plan") != plan:
                entries, kept = _without_existing(entries, top)
                _fetch(backups.blobs(), entries, backup, stage / "contents", progress)
                remove_tree(stage / "files")
                _build(entries, stage)
                ended = _end_runs(entries, stage / "files", backup)
                write_json(stage / "moving.json", {"plan": plan, "ended": ended, "kept": kept}, sync=True)
            else:
                # An earlier restore was killed while it moved files. Finish its moves by the plan that it has stored.
                ended, kept = moving["ended"], moving["kept"]
            _move(entries, stage / "files", top)
    files = [entry for entry in entries if entry.kind == "file"]
    return Restored(
        backup=backup,
        folder=top,
        files=len(files),
        size_bytes=sum(entry.size for entry in files),
        ended=tuple(ended),
        kept=tuple(kept),
    )


def verify(workspace_dir: Path, source: Source, backup_id: str | None = None) -> tuple[Backup, list[str]]:
    """Read a backup's contents. Return the backup and the names of damaged files."""
    with place.open_backups(workspace_dir, source) as backups:
        backup = backups.get(backup_id)
        files = [entry for entry in backups.entries(backup) if entry.kind == "file"]
        damaged = set(backups.blobs().damaged({entry.sha256: entry.size for entry in files}))
    return backup, [entry.name for entry in files if entry.sha256 in damaged]


def _of_run(entries: Sequence[BackupEntry], run: str, backup: Backup) -> list[BackupEntry]:
    units = {entry.unit for entry in entries if entry.name.startswith("runs/")}
    if f"runs/{run}" not in units:
        raise DataError(f"backup {backup.id} has no run {run!r}. Give the whole id.")
    wanted = {unit for unit in units if unit == f"runs/{run}" or unit.startswith(f"runs/{run}_")}
    for entry in entries:
        if entry.unit in wanted and entry.kind == "link":
            meant = os.path.normpath(os.path.join(os.path.dirname(entry.name), entry.target)).split("/")
            if meant[0] == "snapshots":
                wanted.add("/".join(meant[:2]))
    return [entry for entry in entries if entry.unit in wanted]


@contextlib.contextmanager
def _stage(top: Path) -> Iterator[Path]:
    """Yield the locked folder in which the restored files are built."""
    stage = top / _STAGE
    try:
        stage.mkdir(parents=True, mode=0o700, exist_ok=True)
        fd = locks.take(stage / "lock")
    except OSError as error:
        raise DataError(f"{str(stage)!r} can't be written: {error.strerror}. Name another folder.") from error
    if fd is None:
        raise DataError(f"another process restores a backup to {str(top)!r}. Wait for its end.")
    try:
        yield stage
        # A failed restore skips this line and keeps the fetched contents, so that the user's next call need not fetch them again.
        remove_tree(stage)
    finally:
        if not (stage / "contents").exists():
            remove_tree(stage)
        os.close(fd)


def _without_existing(entries: Sequence[BackupEntry], top: Path) -> tuple[list[BackupEntry], list[str]]:
    """Return the backup's entries to restore into `top`, and names in `top` to keep unchanged."""
    units = {entry.unit for entry in entries if "/" in entry.unit}
    there = sorted(unit for unit in units if os.path.lexists(top / unit))
    kept = [unit for unit in there if unit.partition("/")[0] in _STAY or unit in _STAY]
    if conflicts := [unit for unit in there if unit not in kept]:
        raise DataError(
            f"{str(top)!r} has {some(conflicts, 3)} already, and a restore replaces nothing. Restore into an empty folder "
            "(--into), or a single run (--run)."
        )
    return [entry for entry in entries if entry.unit not in kept], kept


def _fetch(
    blobs: Blobs, entries: Sequence[BackupEntry], backup: Backup, contents: Path, progress: Progress | None
) -> None:
    contents.mkdir(exist_ok=True)
    sizes = {entry.sha256: entry.size for entry in entries if entry.kind == "file"}
    names = {entry.sha256: entry.name for entry in entries}
    if bad := [sha256 for sha256, size in sizes.items() if not blobs.has(sha256, size)]:
        raise _damaged(names[bad[0]], backup)
    needed, free = sum(sizes.values()), shutil.disk_usage(contents).free
    if needed > free + sum(file.stat().st_size for file in contents.iterdir()):
        raise DataError(f"the backup needs {needed} bytes in {str(contents)!r}, where {free} are free. Make room.")
    blobs.fetch(sizes, contents, progress)
    for sha256 in sizes:
        if sha256_of(contents / sha256) != sha256:
            (contents / sha256).unlink()
            raise _damaged(names[sha256], backup)


def _damaged(name: str, backup: Backup) -> DataError:
    return DataError(
        f"{name!r} of backup {backup.id} is damaged in the store, and nothing was restored. Name an older backup; where the "
        "workspace still exists, `paceline backup create --verify` stores the file again."
    )


def _build(entries: Sequence[BackupEntry], stage: Path) -> None:
    files, used = stage / "files", set[str]()
    shared: dict[object, Path] = {}
    for entry in entries:
        path = files / entry.name
        if entry.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
        elif entry.kind == "file":
            path.parent.mkdir(parents=True, exist_ok=True)
            key = (entry.sha256, entry.mode, entry.mtime_ns) if entry.is_shared else entry.name
            if key in shared:
                os.link(shared[key], path)
                continue
            if entry.sha256 in used:
                shutil.copyfile(stage / "contents" / entry.sha256, path)
            else:
                # Link the first file with this content to the fetched copy, because a second copy would take disk space.
                os.link(stage / "contents" / entry.sha256, path)
                used.add(entry.sha256)
            os.chmod(path, entry.mode)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
            shared[key] = path
    # Create links after all files, so that no file is written through a link.
    for entry in entries:
        if entry.kind == "link":
            path = files / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(entry.target)
    # Set a folder's own permissions and time after its content is complete.
    for entry in reversed(entries):
        if entry.kind == "folder":
            os.chmod(files / entry.name, entry.mode | 0o700)
            os.utime(files / entry.name, ns=(entry.mtime_ns, entry.mtime_ns))


def _end_runs(entries: Sequence[BackupEntry], files: Path, backup: Backup) -> list[str]:
    """Mark restored runs that were active during the backup as Failed. Return their ids."""
    ended = []
    for unit in sorted({entry.unit for entry in entries if entry.name.startswith("runs/") and "/" in entry.unit}):
        folder = RunFolder(files / unit)
        if not folder.path.is_dir() or runs_store.has_ended(folder):
            continue
        with contextlib.suppress(PacelineError):  # a folder without a readable record is no run
            record = runs_store.stored(folder)
            runs_store.write(folder, _ended(record, backup))
            ended.append(folder.run_id)
    return ended


def _ended(record: RunRecord, backup: Backup) -> RunRecord:
    report = FailureReport(
        cause="restored",
        message=f"The run was {record.status} on {record.owner.get('host')} when backup {backup.id} was made, and was restored "
        "from it.",
        attempt=len(record.attempts) or None,
        see=f"paceline rerun --resume {record.run_id}" if record.kind == "script" else None,
    )
    changes = runs_store.failure_changes(record, report, utc_now())
    return replace(record, status=states.FAILED, scratch_dir=None, **changes)


def _move(entries: Iterable[BackupEntry], files: Path, top: Path) -> None:
    units = {entry.unit for entry in entries}
    for unit in sorted(units, key=lambda name: (name.startswith("runs"), name)):
        if not os.path.lexists(files / unit):
            continue  # a killed restore has already moved this entry
        target = top / unit
        if "/" not in unit:
            target.mkdir(exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            raise DataError(f"{str(target)!r} has come into being meanwhile. Move it away, and restore again.")
        os.rename(files / unit, target)
