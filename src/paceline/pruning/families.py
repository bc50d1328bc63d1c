"""Which runs are wanted no longer. A run and those below it stay or go together."""

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

#: A run with this tag, whatever its value, is never pruned.
KEEP_TAG = "keep"


@dataclass(frozen=True)
class Family:
    """A run that has no parent, or whose parent is gone, and all runs below it. members: those below first."""

    root: RunRecord
    members: tuple[RunRecord, ...]

    @property
    def is_over(self) -> bool:
        return all(record.is_terminal for record in self.members)

    @property
    def ended_s(self) -> float:
        """Return the time at which the last of them ended, in seconds since 1970."""
        # A run that never came to an end of its own is as old as its record.
        return max(parse_utc(record.ended_utc or record.created_utc).timestamp() for record in self.members)

    def folders(self, runs_dir: Path) -> list[RunFolder]:
        return [RunFolder(runs_dir / record.run_id) for record in self.members]


def families(runs_dir: Path) -> list[Family]:
    """All runs of the workspace by family, the newest first."""
    records = {record.run_id: record for record in read.all_records(runs_dir)}
    members: dict[str, list[RunRecord]] = {}
    for record in records.values():
        members.setdefault(_root(record, records), []).append(record)
    return [
        # Newest first, so that what is below comes before what it is below of.
        Family(records[root], tuple(found))
        for root, found in members.items()
    ]


def unwanted(runs_dir: Path, wish: Wish) -> list[Family]:
    """The families that are wanted no longer, the oldest first; none of them lives, is to be kept, or made a model."""
    if not wish.is_for_runs:
        return []
    there = families(runs_dir)
    asked = [family for family in there if _is_asked_for(family, wish)]
    # Counted before ages and tags are looked at: the last five are those of the experiment, whatever their age.
    if wish.keep_last is not None:
        asked = _but_the_last(asked, wish.keep_last)
    latest = time.time() - (wish.older_than_s or 0.0)
    makers = made_by(runs_dir.parent)
    found = [
        family
        for family in asked
        if family.is_over and family.ended_s <= latest and not _is_kept(family.folders(runs_dir), makers)
    ]
    found.sort(key=lambda family: family.ended_s)
    return found if wish.max_bytes is None else _excess(runs_dir, there, found, wish.max_bytes)


def _root(record: RunRecord, records: dict[str, RunRecord]) -> str:
    seen = {record.run_id}
    # Two damaged records may name each other as parent.
    while record.parent_run_id in records and record.parent_run_id not in seen:
        record = records[record.parent_run_id]
        seen.add(record.run_id)
    return record.run_id


def _is_asked_for(family: Family, wish: Wish) -> bool:
    return wish.experiment in (None, family.root.experiment) and wish.status in (None, family.root.status)


def _but_the_last(found: Iterable[Family], count: int) -> list[Family]:
    """All but the newest so many of each experiment."""
    seen: dict[str, int] = {}
    rest = []
    for family in found:
        seen[family.root.experiment] = seen.get(family.root.experiment, 0) + 1
        if seen[family.root.experiment] > count:
            rest.append(family)
    return rest


def _is_kept(folders: Iterable[RunFolder], makers: Container[str]) -> bool:
    """True if one of them has the tag, or made a model, which could not be made again without it."""
    return any(folder.run_id in makers or KEEP_TAG in tags_and_properties.read(folder.notes).tags for folder in folders)


def _excess(runs_dir: Path, there: list[Family], found: list[Family], max_bytes: int) -> list[Family]:
    """As many of those found, the oldest first, as make what is left of all runs no more than that."""
    sizes = {family.root.run_id: sum(tree_size(folder.path) for folder in family.folders(runs_dir)) for family in there}
    # Of all families: those that live or are kept count for the limit, although they stay.
    total, going = sum(sizes.values()), []
    for family in found:
        if total <= max_bytes:
            break
        total -= sizes[family.root.run_id]
        going.append(family)
    return going


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Which runs, snapshots, environments and cached files are wanted no longer. Something goes if every criterion that is
    given, and is for its kind, lets it.

    older_than_s: runs that ended, and environments and files that were last used, so many seconds ago.
    keep_last: of runs, all but the newest so many of each experiment.
    max_bytes: of each kind the oldest, or least recently used, until what is left is no more than that.
    status, experiment: of runs, those alone.

    Raises:
        UserError: a value below zero, or no such state.
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
                f"status={self.status!r} is no state.{did_you_mean(self.status, states.ALL)} There are {', '.join(states.ALL)}."
            )

    @property
    def is_for_runs(self) -> bool:
        """True where a criterion is given; without one, no run is unwanted."""
        return self.is_for_all or any(value is not None for value in (self.keep_last, self.status, self.experiment))

    @property
    def is_for_all(self) -> bool:
        """True where a criterion is given that environments and cached files have as well."""
        return self.older_than_s is not None or self.max_bytes is not None
