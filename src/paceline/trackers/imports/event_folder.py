"""Read TensorBoard's log directories, in which each folder with event files is a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from paceline.errors import UserError
from paceline.trackers.event_file import EventFile, is_event_file
from paceline.trackers.imports.old_run import BrokenRun, OldRun, Point, Problems


def runs(path: Path) -> Iterator[OldRun | BrokenRun]:
    """Yield the runs below a TensorBoard log directory."""
    top = path.parent if path.is_file() else path
    folders = [
        Path(place) for place, below, names in os.walk(top) if not below.sort() and any(map(is_event_file, names))
    ]
    if not folders:
        raise UserError(f"{str(path)!r} has no event files (*tfevents*). Name TensorBoard's --logdir.")
    for folder in folders:
        name = folder.relative_to(top).as_posix()
        problems = Problems()
        files = []
        for file in sorted(folder.iterdir()):
            if not is_event_file(file.name):
                continue
            if file.is_symlink() or not file.is_file():
                problems.note("left out a link or special file", file.name)
            else:
                files.append(file)
        yield OldRun(
            key=f"{top.resolve().name}/{name}",
            experiment=top.resolve().name,
            name=name if name != "." else top.resolve().name,
            points=_points_of(files, problems),
            problems=problems,
        )


def _points_of(files: list[Path], problems: Problems) -> Callable[[], Iterable[Point]]:
    def points() -> Iterator[Point]:
        for file in files:
            events = EventFile(file)
            for scalar in events.new():
                yield Point(scalar.tag, scalar.value, scalar.step, scalar.time)
            if events.offset < file.stat().st_size:
                problems.note("left out the rest of an event file after a torn or damaged record", file.name)

    return points
