"""Import runs of other trackers: MLflow, W&B, TensorBoard, Neptune and Aim.

Each tracker has a reader (`old_run.Reader`), which yields its runs and never writes to its store. `adopt` writes the runs to a
workspace.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.system import locks
from paceline.system.names import did_you_mean
from paceline.trackers.imports.old_run import OldRun, Reader
from paceline.workspace_dir import configured

if TYPE_CHECKING:
    from paceline.trackers.imports.adopt import Adopter, ImportedRun

#: Name of a tracker -> the module that reads the tracker's runs.
TRACKERS = {
    "mlflow": "mlflow_store",
    "wandb": "wandb_folder",
    "tensorboard": "event_folder",
    "neptune": "neptune_export",
    "aim": "aim_repo",
}
_LOCK_S = 5.0


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    Attributes:
        tracker: The tracker that the runs come from.
        runs: For each run its `key` in the tracker's store, its `run_id` in the workspace, the `outcome` ("new", "grown",
            "unchanged" or "broken"), and `problems`: sentences on parts that were left out.
    """

    tracker: str
    runs: tuple[ImportedRun, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of imported runs of each outcome, such as "new"."""
        return dict(Counter(run["outcome"] for run in self.runs))


def import_runs(
    tracker: str,
    path: str | os.PathLike[str],
    *,
    workspace: str | os.PathLike[str] | None = None,
    experiment: str | None = None,
    dry_run: bool = False,
) -> ImportReport:
    """Import the runs of another tracker's store, and return a report.

    A repeated import adds only runs and values that are new in the store. It also completes an interrupted import.

    Args:
        tracker: "mlflow", "wandb", "tensorboard", "neptune" or "aim".
        path: The store: `mlruns` or MLflow's SQLite file, W&B's folder `wandb`, TensorBoard's log directory, the folder
            of Neptune's exporter, or the folder with Aim's `.aim`.
        workspace: The workspace's folder; default: the configured workspace.
        experiment: Experiment of all imported runs; default: the experiment or project in the store.
        dry_run: Read the store, but import nothing.

    Raises:
        UserError: The tracker or the path is invalid, or a package for reading the store is not installed.

    Examples:
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> with SummaryWriter("old_logs") as writer:
        ...     writer.add_scalar("loss", 0.5, 1)
        >>> pl.import_runs("tensorboard", "old_logs", workspace="my_runs").counts
        {'new': 1}
        >>> pl.import_runs("tensorboard", "old_logs", workspace="my_runs").counts
        {'unchanged': 1}
    """
    from paceline.trackers.imports.adopt import Adopter

    if tracker not in TRACKERS:
        raise UserError(f"tracker {tracker!r}: choose one of {', '.join(TRACKERS)}.{did_you_mean(tracker, TRACKERS)}")
    store = Path(path).absolute()
    if not store.exists():
        raise UserError(f"there is no {str(store)!r}. Give the path of the {tracker} store.")
    top = configured() if workspace is None else Path(workspace)
    runs_dir = top / "runs"
    adopter = Adopter(runs_dir, tracker, experiment, dry_run=dry_run)
    if not dry_run:
        runs_dir.mkdir(parents=True, exist_ok=True)
    reader: Reader = import_module(f"{__name__}.{TRACKERS[tracker]}").runs
    try:
        with contextlib.nullcontext() if dry_run else locks.locked(top / "import.lock", patience_s=_LOCK_S):
            return ImportReport(tracker, _imported(adopter, reader, store))
    except locks.LockHeldError as error:
        raise UserError(f"another import writes to {str(top)!r}. Wait for its end. ({error})") from error


def _imported(adopter: Adopter, reader: Reader, path: Path) -> tuple[ImportedRun, ...]:
    try:
        olds = list(reader(path))
    except PermissionError as error:
        raise UserError(f"{str(error.filename)!r} can't be read: {error.strerror}. Ask its owner.") from error
    # Collect all ids first, because a store may list a child run before its parent run.
    for old in olds:
        if isinstance(old, OldRun):
            adopter.remember(old)
    return tuple(adopter.add(old) for old in olds)
