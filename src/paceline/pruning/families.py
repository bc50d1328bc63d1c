"""Families of runs, and the criteria by which they are removed.

A run and its child runs form a family, which is kept or removed as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.pruning.snapshots import made_by
from paceline.runs import read, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, parse_utc
from paceline.system.files import tree_size
from paceline.system.names import did_you_mean

#: A run with this tag is never pruned, whether or not the tag has a value.
KEEP_TAG = "keep"


@dataclass(frozen=True)
class Family:
    """A run and its descendants. members: their records, children before parents."""

    root: RunRecord
    members: tuple[RunRecord, ...]

    @property
    def is_over(self) -> bool:
        return all(record.is_terminal for record in self.members)

    @property
    def ended_s(self) -> float:
        """The time when the family's last run ended, in seconds since 1970."""
        # If a run has no end, use the time of its creation.
        return max(parse_utc(record.ended_utc or record.created_utc).timestamp() for record in self.members)

    def folders(self, runs_dir: Path) -> list[RunFolder]:
        return [RunFolder(runs_dir / record.run_id) for record in self.members]


def families(runs_dir: Path) -> list[Family]:
    """Return all runs of the workspace as families, the newest first."""
    records = {record.run_id: record for record in read.all_records(runs_dir)}
    members: dict[str, list[RunRecord]] = {}
    for record in records.values():
        members.setdefault(_root(record, records), []).append(record)
    return [
        # A family (a run and its child runs) lists children before parents, because `found` has the newest runs first.
        Family(records[root], tuple(found))
        for root, found in members.items()
    ]


def unwanted(runs_dir: Path, policy: PrunePolicy) -> list[Family]:
    """Return the families of runs to remove under `policy`, the oldest first."""
    if not policy.is_for_runs:
        return []
    there = families(runs_dir)
    matching = [family for family in there if _is_asked_for(family, policy)]
    # Apply keep_last before the filters by age and tags: it keeps the newest families of an experiment, even old ones.
    if policy.keep_last is not None:
        matching = _but_the_last(matching, policy.keep_last)
    latest = time.time() - (policy.older_than_s or 0.0)
    makers = made_by(runs_dir.parent)
    unwanted = [
        family
        for family in matching
        if family.is_over and family.ended_s <= latest and not _is_kept(family.folders(runs_dir), makers)
    ]
    unwanted.sort(key=lambda family: family.ended_s)
    return unwanted if policy.max_bytes is None else _excess(runs_dir, there, unwanted, policy.max_bytes)


def _root(record: RunRecord, records: dict[str, RunRecord]) -> str:
    seen = {record.run_id}
    # Stop at a loop, because damaged records may name each other as the parent run.
    while record.parent_run_id in records and record.parent_run_id not in seen:
        record = records[record.parent_run_id]
        seen.add(record.run_id)
    return record.run_id


def _is_asked_for(family: Family, policy: PrunePolicy) -> bool:
    return policy.experiment in (None, family.root.experiment) and policy.status in (None, family.root.status)


def _but_the_last(families: Iterable[Family], count: int) -> list[Family]:
    """Return all families except the newest `count` of each experiment."""
    seen: dict[str, int] = {}
    rest = []
    for family in families:
        seen[family.root.experiment] = seen.get(family.root.experiment, 0) + 1
        if seen[family.root.experiment] > count:
            rest.append(family)
    return rest


def _is_kept(folders: Iterable[RunFolder], makers: Container[str]) -> bool:
    """Return whether a run has the tag `keep`, or made a model (ids `makers`)."""
    return any(folder.run_id in makers or KEEP_TAG in tags_and_properties.read(folder.notes).tags for folder in folders)


def _excess(runs_dir: Path, there: list[Family], candidates: list[Family], max_bytes: int) -> list[Family]:
    """Return the first `candidates` to remove, so that all families (`there`) fit into `max_bytes`."""
    sizes = {family.root.run_id: sum(tree_size(folder.path) for folder in family.folders(runs_dir)) for family in there}
    # Count families that still run, or that a tag keeps, towards the limit, although they are not removed.
    total, going = sum(sizes.values()), []
    for family in candidates:
        if total <= max_bytes:
            break
        total -= sizes[family.root.run_id]
        going.append(family)
    return going


@dataclass(frozen=True, kw_only=True)
class PrunePolicy:
    """Criteria for removal, all of which a run or file must meet. None is no criterion.

    Attributes:
        older_than_s: Remove runs that ended, and environments and files that were last used, this many seconds ago or earlier.
        keep_last: Number of the newest runs of each experiment to keep.
        max_bytes: Remove the oldest runs, the longest unused environments and the longest unused files, each down to this size.
        status: Remove only runs in this state.
        experiment: Remove only runs of this experiment.

    Raises:
        UserError: A number is below zero, or `status` is not a run's state.
    """

    older_than_s: float | None = None
    keep_last: int | None = None
    max_bytes: int | None = None
    status: str | None = None
    experiment: str | None = None

    def __post_init__(self) -> None:
        for name in ("older_than_s", "keep_last", "max_bytes"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UserError(f"{name}={value}: it can't be below 0.")
        if self.status is not None and self.status not in states.ALL:
            raise UserError(
                f"status={self.status!r} is not a state.{did_you_mean(self.status, states.ALL)} There are "
                f"{', '.join(states.ALL)}."
            )

    @property
    def is_for_runs(self) -> bool:
        """Whether the policy has a criterion for runs; if not, no run is removed."""
        return self.is_for_all or any(value is not None for value in (self.keep_last, self.status, self.experiment))

    @property
    def is_for_all(self) -> bool:
        """Whether the policy has a criterion that also applies to environments and files."""
        return self.older_than_s is not None or self.max_bytes is not None
