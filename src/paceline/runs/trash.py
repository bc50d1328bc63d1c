"""The trash of a workspace, which keeps deleted runs for a week.

    runs/<run id>  ->  trash/<run id>  ->  runs/<run id>          restored
                                       ->  trash/.gone-<run id>   removed for good

A run moves by one rename, so no process finds a part of a run. The run's `deleted.json` has the time and the user.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.errors import PacelineError, RunNotFoundError, RunStateError
from paceline.runs import read, removal, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id, is_run_id
from paceline.runs.record import RunRecord, parse_utc, user_name, utc_at, utc_now, utc_text
from paceline.system.files import names_in, read_json

KEPT_DAYS = 7


@dataclass(frozen=True, kw_only=True)
class DeletedRun:
    """A run in the trash, with the time and user of its deletion.

    Attributes:
        folder: The run's folder in the trash.
        deleted_utc: When the run was deleted.
        deleted_by: The user who deleted the run.
        with_run: Id of the run that the user deleted: this run, or a run above it, such as a trial's sweep.
    """

    folder: RunFolder
    deleted_utc: str
    deleted_by: str
    with_run: str

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @cached_property
    def name(self) -> str:
        """The run's display name, or its id."""
        # Read the name only when needed: a page shows a hundred of perhaps 10,000 runs.
        return str(tags_and_properties.read(self.folder.notes).name or self.run_id)

    @property
    def kept_until_utc(self) -> str:
        """The time from which the run may be removed for good."""
        return utc_text(parse_utc(self.deleted_utc) + dt.timedelta(days=KEPT_DAYS))


def delete(runs_dir: Path, folders: Iterable[RunFolder], *, force: bool = False) -> list[str]:
    """Move ended runs and their children to the workspace's trash.

    Runs that have been in the trash for a week are removed for good.

    force: Also accept a run whose engine does not answer (NotResponding).

    Raises:
        RunNotFoundError: A run does not exist any more.
        RunStateError: A run or a run below it has not ended. Nothing is deleted then.
    """
    above = _parents(runs_dir)
    families = [(folder, [*_below(runs_dir, above, [folder]), folder]) for folder in dict.fromkeys(folders)]
    for root, family in families:
        _check_parent(read.record(root), runs_dir)
        for folder in family:
            removal.check_removable(read.record(folder), force=force)
            store.check_own(folder, "delete")
    expire(runs_dir.parent)
    moved = []
    for root, family in families:
        for folder in family:
            # Skip a run that has already been moved with its parent: the list may name both the run and its parent.
            if folder.run_id not in moved:
                _move(folder, root.run_id, force=force)
                moved.append(folder.run_id)
    return moved


def _check_parent(record: RunRecord, runs_dir: Path) -> None:
    with contextlib.suppress(RunNotFoundError):
        above = record.parent_run_id
        parent = read.record(RunFolder(runs_dir / above)) if is_run_id(above) else None
        if parent is not None and parent.kind in ("sweep", "pipeline") and not parent.is_terminal:
            raise RunStateError(
                f"run {record.run_id} belongs to the {parent.kind} {parent.run_id}, which is {parent.status}. Delete it when the "
                f"{parent.kind} has ended, or end the {parent.kind} first: paceline cancel --wait {parent.run_id}"
            )


def _move(folder: RunFolder, with_run: str, *, force: bool) -> None:
    trash = folder.path.parents[1] / "trash"
    if folder.path.is_symlink():
        raise RunStateError(
            f"run {folder.run_id} is a link to {os.readlink(folder.path)!r}, and the trash keeps folders only. Remove the link "
            f"itself: rm {str(folder.path)!r}"
        )
    try:
        trash.mkdir(exist_ok=True)
    except OSError as error:
        raise RunStateError(f"run {folder.run_id} can't be deleted: {error.strerror}: {error.filename!r}.") from error
    mark = {"time_utc": utc_now(), "by": user_name(), "with": with_run}
    removal.move_out(folder, trash / folder.run_id, force=force, mark=mark)


def below(runs_dir: Path, folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Return the descendants of these runs (trials, steps), the deepest first."""
    return _below(runs_dir, _parents(runs_dir), folders)


def _parents(runs_dir: Path) -> dict[str, object]:
    found = {}
    for run_id in store.ids(runs_dir):
        data = read_json(RunFolder(runs_dir / run_id).job)
        found[run_id] = data.get("parent_run_id") if isinstance(data, dict) else None
    return found


def _below(runs_dir: Path, above: Mapping[str, object], folders: Sequence[RunFolder]) -> list[RunFolder]:
    named = {folder.run_id for folder in folders}
    parents = set(named)
    while grown := {run_id for run_id, parent in above.items() if parent in parents} - parents:
        parents |= grown
    # `above` begins with the newest run, and a child is newer than its parent, so children come before their parents.
    return [RunFolder(runs_dir / run_id) for run_id in above if run_id in parents - named]


def deleted(workspace_dir: Path) -> list[DeletedRun]:
    """Return the runs in the workspace's trash, newest deletion first."""
    folders = [RunFolder(workspace_dir / "trash" / name) for name in names_in(workspace_dir / "trash")]
    found = [_deleted(folder) for folder in folders if _is_run(folder.path)]
    return sorted(found, key=lambda run: run.deleted_utc, reverse=True)


def find(workspace_dir: Path, run_id: str) -> DeletedRun | None:
    """Return the run with this id in the trash, or None."""
    folder = RunFolder(workspace_dir / "trash" / check_run_id(run_id))
    return _deleted(folder) if _is_run(folder.path) else None


def _is_run(path: Path) -> bool:
    # Ignore links: another user may have put a link here, and restoring a run writes to its folder.
    return is_run_id(path.name) and path.is_dir() and not path.is_symlink()


def _deleted(folder: RunFolder) -> DeletedRun:
    # Check the types, since another user of the workspace may have written the file.
    mark = read_json(folder.deleted)
    mark = mark if isinstance(mark, dict) else {}
    try:
        deleted_utc = utc_text(min(parse_utc(mark["time_utc"]), dt.datetime.now(dt.timezone.utc)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        deleted_utc = utc_now()
        with contextlib.suppress(OSError):
            deleted_utc = utc_at(folder.path.stat().st_ctime)
    return DeletedRun(
        folder=folder,
        deleted_utc=deleted_utc,
        deleted_by=str(mark.get("by") or ""),
        with_run=str(mark.get("with") or folder.run_id),
    )


def restore(workspace_dir: Path, run_id: str, there: Sequence[DeletedRun] | None = None) -> list[RunFolder]:
    """Restore a deleted run, and the runs that were deleted with it.

    run_id: The run's id, a unique beginning of it, or its name.
    there: The runs in the trash, if the caller has them (`deleted`); None to list them here.

    Raises:
        RunNotFoundError: No run in the trash matches, or several do.
        RunStateError: The workspace has a run of this id, or the folder cannot be moved.
    """
    there = deleted(workspace_dir) if there is None else there
    meant = _meant(there, run_id)
    # Restore parents first: a child without its parent would look like an independent run.
    family = sorted((run for run in there if meant in (run.run_id, run.with_run)), key=lambda run: run.run_id != meant)
    restored = []
    for run in family:
        folder = RunFolder(workspace_dir / "runs" / run.run_id)
        try:
            os.rename(run.folder.path, folder.path)
        except FileNotFoundError:
            continue  # another process has restored or removed this run
        except OSError as error:
            why = "there is a run of this id" if folder.path.exists() else error.strerror
            raise RunStateError(f"run {run.run_id} can't be restored: {why}: {str(folder.path)!r}.") from error
        removal.unmark(folder)
        restored.append(folder)
    return restored


def _meant(there: Sequence[DeletedRun], text: str) -> str:
    ids = [run.run_id for run in there]
    # Search by name only if no id matches, since each name is in a separate file.
    finds: tuple[Callable[[], list[str]], ...] = (
        lambda: [run_id for run_id in (*ids, *(run.with_run for run in there)) if run_id == text][:1],
        lambda: [run_id for run_id in ids if text and run_id.startswith(text)],
        lambda: [run.run_id for run in there if run.name == text],
    )
    for find in finds:
        found = find()
        # If one id is the beginning of all other found ids, it is a sweep's id, and the others are its trials: return the sweep.
        if found and (
            len(found) == 1 or all(run_id.startswith(f"{min(found)}_") for run_id in set(found) - {min(found)})
        ):
            return min(found)
        if found:
            raise RunNotFoundError(
                f"{len(found)} deleted runs are called {text!r}: {', '.join(found[:5])}. Give more of the id."
            )
    raise RunNotFoundError(
        f"no run {text!r} is in the trash, which keeps deleted runs for {KEPT_DAYS} days. `paceline restore` lists them."
    )


def purge(run: DeletedRun) -> None:
    """Remove a run in the trash for good.

    Raises:
        RunStateError: Some files are another user's, and stay.
    """
    try:
        removal.discard(run.folder.path)
    except OSError as error:
        raise RunStateError(f"run {run.run_id} can't be removed: {error.strerror}: {error.filename!r}.") from error


def expire(workspace_dir: Path) -> None:
    """Remove expired runs from the trash. Never raises."""
    removal.sweep(workspace_dir / "trash")
    now = utc_now()
    for run in deleted(workspace_dir):
        if run.kept_until_utc < now:
            with contextlib.suppress(PacelineError):
                purge(run)
