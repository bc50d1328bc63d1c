"""A run of another tracker, with values that are not checked yet."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.runs import states

#: State of a run that the tracker's store lists as running. The run may have been killed.
UNFINISHED = "Unfinished"


class Problems(Counter[str]):
    """Counts of messages about omitted parts of a run, with an example each."""

    def __init__(self) -> None:
        super().__init__()
        self._examples: dict[str, str] = {}

    def note(self, text: str, example: object = "") -> None:
        self[text] += 1
        self._examples.setdefault(text, str(example)[:200])

    def sentences(self) -> list[str]:
        found = []
        for text, count in self.items():
            example = f": {self._examples[text]!r}" if self._examples[text] else ""
            found.append(text + example + (f" and {count - 1} more" if count > 1 else ""))
        return found


class Point(NamedTuple):
    """A metric's value. kind: None for a scalar, else such as "row" or "image"."""

    name: object
    value: object
    step: object
    time_s: object
    kind: str | None = None


class OldFile(NamedTuple):
    """A file of another tracker's run.

    name: Name in the new run. inside: Path relative to the folder `top`, without links in it.
    """

    name: str
    top: Path
    inside: str


@dataclass(frozen=True, kw_only=True)
class OldRun:
    """A run of another tracker.

    key: The run's id in the tracker's store. parent: The id of its parent run. points, files: Functions that read the
    metric values and files from the store, which may not fit in memory. problems: Messages about omitted parts.
    """

    key: str
    experiment: str
    points: Callable[[], Iterable[Point]]
    files: Callable[[], Iterable[OldFile]] = tuple
    name: object = None
    description: object = None
    user: object = None
    state: str = states.COMPLETED
    started_s: object = None
    ended_s: object = None
    parent: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    tags: Mapping[str, object] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)


@dataclass(frozen=True)
class BrokenRun:
    """A run that cannot be read, with the reason."""

    key: str
    why: str


#: A reader yields the runs of the store at a path. It raises UserError if there is no store, or if a package is missing.
Reader = Callable[[Path], Iterator["OldRun | BrokenRun"]]


def files_below(top: Path, prefix: str, problems: Problems) -> list[OldFile]:
    """Return the regular files below a folder, and add other files to `problems`."""
    found: list[OldFile] = []
    for place, folders, names in os.walk(top):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in sorted([*names, *links]):
            path = os.path.join(place, name)
            inside = os.path.relpath(path, top)
            if name in links or os.path.islink(path) or not os.path.isfile(path):
                problems.note("left out a link or special file", inside)
            else:
                found.append(OldFile(f"{prefix}/{inside}", top, inside))
    return found


def is_below(path: Path, top: Path) -> bool:
    """Return whether the real path is below `top`."""
    return path.resolve().is_relative_to(top.resolve())
