"""Remove unused snapshots and model files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.models import keep, registry, staging
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.system import linked
from paceline.system.files import age_s, gone_is_fine, names_in, read_json, remove_tree

#: Keep a snapshot without a run for this many seconds. A submission takes less time (a guess) to write the run's record.
_FRESH_S = 600.0
#: Age in seconds from which an unfinished copy counts as left by a killed submission.
_ABANDONED_S = 86400.0
_GONE, _NEW = ".gone-", ".new-"


def unused(workspace_dir: Path, without: Collection[str] = ()) -> list[tuple[str, int]]:
    """Return (id, bytes) of each old snapshot that no run or model uses.

    A snapshot is old 10 minutes after its last use. Ignore uses by the runs `without`. Count a hard-linked file's bytes once.
    """
    used = {name for run_id, name in _used(workspace_dir / "runs") if run_id not in without}
    # Keep the snapshots of runs in the trash, because such a run may be restored.
    used |= {name for _, name in _used(workspace_dir / "trash")}
    # Keep the snapshots of models, even if the run that made the model is removed.
    used |= {name for name in made_by(workspace_dir).values() if name is not None}
    folder = workspace_dir / "snapshots"
    names = [name for name in names_in(folder) if not name.startswith(".") and name not in used]
    unused = [path for path in map(folder.joinpath, names) if age_s(path) > _FRESH_S]
    return list(zip([path.name for path in unused], _sizes(unused), strict=True))


def remove(workspace_dir: Path, name: str) -> bool:
    """Remove a snapshot. Return False if it was just used, or on an error."""
    path = workspace_dir / "snapshots" / name
    gone = path.with_name(f"{_GONE}{name[:16]}-{secrets.token_hex(4)}")
    # Keep a young snapshot: a submission touches its snapshot before it writes the run's record, which names the snapshot.
    if age_s(path) <= _FRESH_S:
        return False
    # Rename before deleting, so that a later submission makes a new snapshot instead of finding a partly deleted one.
    try:
        os.rename(path, gone)
    except OSError:
        return False
    if age_s(gone) <= _FRESH_S:  # a submission has used the snapshot just before the rename
        os.rename(gone, path)
        return False
    with gone_is_fine():
        for listed in linked.files_of(path):
            listed.unlink()
        remove_tree(gone)
    return True


def sweep(workspace_dir: Path) -> None:
    """Remove partial snapshots that killed processes have left, ignoring errors."""
    with gone_is_fine():
        for path in (workspace_dir / "snapshots").iterdir():
            if path.name.startswith(_GONE) or (path.name.startswith(_NEW) and age_s(path) > _ABANDONED_S):
                with gone_is_fine():
                    remove_tree(path)


def _used(runs_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield (run id, snapshot id) for every snapshot of every run."""
    for run_id in store.ids(runs_dir):
        folder = RunFolder(runs_dir / run_id)
        for name in names_in(folder.sources):
            yield run_id, name
        try:
            yield run_id, os.path.basename(os.readlink(folder.snapshot))
        except OSError:
            # The run's folder has no link to a snapshot: the submission has not made the link yet, or the run is interactive.
            data = read_json(folder.job)
            if isinstance(data, dict) and isinstance(data.get("snapshot_id"), str):
                yield run_id, data["snapshot_id"]


def _sizes(paths: list[Path]) -> list[int]:
    """Return the bytes freed by removing each folder, one after the other."""
    names: dict[tuple[int, int], int] = {}
    sizes = []
    for path in paths:
        size = 0
        for folder, _, files in os.walk(path):
            for file in files:
                with gone_is_fine():
                    status = os.lstat(os.path.join(folder, file))
                    # Hard links share one file's bytes, which become free only when the last link is removed.
                    if status.st_nlink > 1:
                        key = (status.st_dev, status.st_ino)
                        names[key] = names.get(key, 0) + 1
                        if names[key] < status.st_nlink:
                            continue
                    size += status.st_size
        sizes.append(size)
    return sizes


def prune(workspace_dir: Path, *, dry_run: bool = False) -> int:
    """Remove unused model files, and return the freed bytes."""
    parts, blobs = registry.parts_dir(workspace_dir), registry.blobs_dir(workspace_dir)
    # Remove abandoned staging folders first: their hard links to model files would make these files count as used.
    freed = sum(size for _, size in staging.abandoned(parts)) if dry_run else staging.sweep(parts)
    for path, size in [*keep.unneeded(blobs)]:
        freed += size if dry_run else keep.drop(path)
    return freed


def made_by(workspace_dir: Path) -> dict[str, str | None]:
    """Return {run id: snapshot id, None if unknown} of all runs that made models."""
    return {record.run_id: record.run.get("snapshot_id") for record in registry.records(workspace_dir) if record.run_id}
