"""Remove old runs first, and then the snapshots, environments and files that became unused."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, UserError
from paceline.pruning import environments, snapshots
from paceline.pruning.families import PrunePolicy, unwanted
from paceline.runs import removal, trash
from paceline.system.files import tree_size

KINDS = ("runs", "snapshots", "environments", "data", "models")


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A removed run, snapshot or environment, with its size in bytes."""

    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The runs and files that `prune` removed, or would remove without dry_run.

    Attributes:
        data_bytes: The size of removed files of the data cache.
        models_bytes: The size of removed model files that no version of a model uses, or that a killed registration left behind.
        failed: Messages about runs that could not be removed.
    """

    runs: tuple[Removed, ...] = ()
    snapshots: tuple[Removed, ...] = ()
    environments: tuple[Removed, ...] = ()
    data_bytes: int = 0
    models_bytes: int = 0
    failed: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the total size of all removed runs and files in bytes."""
        return (
            self.data_bytes
            + self.models_bytes
            + sum(one.size_bytes for one in (*self.runs, *self.snapshots, *self.environments))
        )

    def __bool__(self) -> bool:
        return bool(self.runs or self.snapshots or self.environments or self.data_bytes or self.models_bytes)

    def to_json(self) -> dict[str, object]:
        return {
            "runs": [{"run_id": one.name, "size_bytes": one.size_bytes} for one in self.runs],
            "snapshots": [{"snapshot_id": one.name, "size_bytes": one.size_bytes} for one in self.snapshots],
            "environments": [{"key": one.name, "size_bytes": one.size_bytes} for one in self.environments],
            "data_bytes": self.data_bytes,
            "models_bytes": self.models_bytes,
            "size_bytes": self.size_bytes,
            "failed": list(self.failed),
        }


def prune(workspace_dir: Path, policy: PrunePolicy, kinds: Collection[str] = (), *, dry_run: bool = False) -> Pruned:
    """Remove runs and files that the policy selects and no unfinished run uses.

    kinds: "runs", "snapshots", "environments", "data" or "models". By default: unused snapshots and model files; runs,
    if the policy has a criterion; environments and cached data, if it has an age or a size. dry_run: Remove nothing.

    Raises:
        UserError: A kind is unknown, or `kinds` names runs and the policy has no criterion.
    """
    if unknown := sorted({*kinds} - {*KINDS}):
        raise UserError(f"{unknown[0]!r} can't be pruned. There are {', '.join(KINDS)}.")
    if "runs" in kinds and not policy.is_for_runs:
        raise UserError(
            "which runs are to go? Give --older-than 30d, --keep-last N, --max-size 20GB, --status or --experiment "
            "(older_than=, keep_last=, max_size=, status=, experiment=). A single run goes with `paceline rm RUN`."
        )
    if not kinds:
        kinds = KINDS if policy.is_for_all else ("runs", "snapshots", "models")
    if not dry_run:
        # Always remove the remains of killed removals and killed submissions.
        removal.sweep(workspace_dir / "runs")
        trash.expire(workspace_dir)
        snapshots.sweep(workspace_dir)
    # Remove runs first, because only this makes their snapshots and environments unused.
    runs, failed = _prune_runs(workspace_dir, policy, dry_run) if "runs" in kinds else ([], [])
    return Pruned(
        runs=tuple(runs),
        failed=tuple(failed),
        snapshots=_prune_snapshots(workspace_dir, runs, dry_run) if "snapshots" in kinds else (),
        environments=_prune_environments(workspace_dir, policy, dry_run) if "environments" in kinds else (),
        data_bytes=_prune_data(policy, dry_run) if "data" in kinds else 0,
        models_bytes=snapshots.prune(workspace_dir, dry_run=dry_run) if "models" in kinds else 0,
    )


def _prune_runs(workspace_dir: Path, policy: PrunePolicy, dry_run: bool) -> tuple[list[Removed], list[str]]:
    runs_dir = workspace_dir / "runs"
    gone, failed = [], []
    for family in unwanted(runs_dir, policy):
        for folder in family.folders(runs_dir):
            size = tree_size(folder.path)
            try:
                if not dry_run:
                    removal.remove(folder)
            except PacelineError as error:
                failed.append(str(error))
                break  # keep this run's parents too, which come later in this list
            gone.append(Removed(name=folder.run_id, size_bytes=size))
    return gone, failed


def _prune_snapshots(workspace_dir: Path, runs: list[Removed], dry_run: bool) -> tuple[Removed, ...]:
    # A dry run has not removed `runs`. So count their snapshots as unused here.
    unused = snapshots.unused(workspace_dir, {run.name for run in runs})
    return tuple(
        Removed(name=name, size_bytes=size) for name, size in unused if dry_run or snapshots.remove(workspace_dir, name)
    )


def _prune_environments(workspace_dir: Path, policy: PrunePolicy, dry_run: bool) -> tuple[Removed, ...]:
    living = environments.living_runs(workspace_dir)
    removed = environments.prune(workspace_dir, policy, living, dry_run=dry_run)
    return tuple(Removed(name=key, size_bytes=size) for key, size in removed)


def _prune_data(policy: PrunePolicy, dry_run: bool) -> int:
    from paceline.data.transfer.cache import DataCache

    with contextlib.suppress(FileNotFoundError):
        return DataCache().prune(policy.max_bytes or 0, unused_for_s=policy.older_than_s or 0.0, dry_run=dry_run)
    return 0
