"""Remove unused environments, both Python environments and layers on container images."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.containers import all_layers, prune_layers
from paceline.environments.store import EnvironmentStore
from paceline.errors import PacelineError
from paceline.pruning.families import PrunePolicy
from paceline.runs.folder import RunFolder
from paceline.runs.read import all_records
from paceline.runs.record import RunRecord, parse_utc
from paceline.system.files import read_json, tree_size


@dataclass(frozen=True)
class _Kept:
    key: str
    used_s: float
    size_bytes: int


def prune(
    workspace_dir: Path, policy: PrunePolicy, living: Iterable[RunRecord], *, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Remove environments that meet `policy` and that no unfinished run needs.

    Return (key, bytes) of each removed environment. living: The records of runs that have not ended, on any machine.
    """
    folder = workspace_dir / "environments"
    if not folder.is_dir():
        return []
    store, images = EnvironmentStore(folder), folder / "images"
    there = [_Kept(built.key, parse_utc(built.last_used_utc).timestamp(), built.size_bytes) for built in store.all()]
    there += [_Kept(layer.key, layer.used_at, tree_size(images / layer.key)) for layer in all_layers(images)]
    needed = _needed(workspace_dir, store, living)
    latest = time.time() - (policy.older_than_s or 0.0)
    left = sum(kept.size_bytes for kept in there)
    chosen: dict[str, int] = {}
    # Remove the environments that were unused for the longest time, until the remaining environments fit into `max_bytes`.
    for kept in sorted(there, key=lambda kept: kept.used_s):
        if policy.max_bytes is not None and left <= policy.max_bytes:
            break
        if kept.key not in needed and kept.used_s <= latest:
            chosen[kept.key] = kept.size_bytes
            left -= kept.size_bytes
    # `store.prune` and `prune_layers` lock an environment before its removal, so they skip an environment that a local run uses.
    gone = [built.key for built in store.prune(only=chosen, dry_run=dry_run)]
    gone += [layer.key for layer in prune_layers(images, only=chosen, dry_run=dry_run)]
    return [(key, chosen[key]) for key in gone]


def free_keys(workspace_dir: Path) -> set[str]:
    """Return the keys of environments that no unfinished run needs."""
    folder = workspace_dir / "environments"
    if not folder.is_dir():
        return set()
    store = EnvironmentStore(folder)
    there = {built.key for built in store.all()} | {layer.key for layer in all_layers(folder / "images")}
    return there - _needed(workspace_dir, store, living_runs(workspace_dir))


def living_runs(workspace_dir: Path) -> list[RunRecord]:
    """Return the records of runs that have not ended."""
    return [record for record in all_records(workspace_dir / "runs") if not record.is_terminal]


def _needed(workspace_dir: Path, store: EnvironmentStore, living: Iterable[RunRecord]) -> set[str]:
    """Return the keys of environments that the unfinished runs `living` need."""
    keys = set()
    for record in living:
        built = read_json(RunFolder(workspace_dir / "runs" / record.run_id).environment)
        if isinstance(built, dict) and isinstance(built.get("key"), str):
            keys.add(built["key"])
        # A queued run has not recorded its environment yet, but the run's job determines the environment's key.
        elif record.job is not None and record.job.environment.needs_build:
            # If an interpreter or a file is missing by now, the run will fail, so it needs no environment.
            with contextlib.suppress(PacelineError, OSError):
                environment = record.job.environment
                if (found := store.find(environment, environment.python or sys.executable)) is not None:
                    keys.add(found.key)
    return keys
