"""A comparison of a dataset's files with those that were registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo

Then: TypeAlias = "Mapping[tuple[str | None, str], tuple[int, str]]"

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ContentCheck:
    """The differences: paths, sorted. `str()` says it in words; true where all is the same."""

    dataset: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.added or self.removed or self.changed)

    def __str__(self) -> str:
        if self:
            return f"dataset {self.dataset!r} has the content that was registered"
        parts = [
            f"{len(paths)} {what} ({', '.join(map(repr, paths[:_SHOWN]))}{', ...' if len(paths) > _SHOWN else ''})"
            for what, paths in (("added", self.added), ("removed", self.removed), ("changed", self.changed))
            if paths
        ]
        return f"dataset {self.dataset!r} no longer has the content that was registered: {'; '.join(parts)}"


def compare(dataset: str, then: Then, now: Sequence[FileInfo]) -> ContentCheck:
    """The files of a dataset as they were against those that are there now.

    then: (datastore, path) -> (size, version).
    """
    there = {(info.datastore, info.path): (info.size, info.version) for info in now}
    return ContentCheck(
        dataset=dataset,
        added=_paths(there.keys() - then.keys()),
        removed=_paths(then.keys() - there.keys()),
        changed=_paths({key for key in then.keys() & there.keys() if tuple(then[key]) != there[key]}),
    )


def _paths(keys: set[tuple[str | None, str]]) -> tuple[str, ...]:
    return tuple(sorted(path for _, path in keys))
