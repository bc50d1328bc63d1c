"""Event files of programs other than a worker's Python.

One such program is Python in a shell script.

No hook sees these programs, so their values are read at the attempt's end.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.runs.context import WorkerContext
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import placed_entries_by_name
from paceline.trackers.board import event_folders
from paceline.trackers.event_file import EventFile, is_event_file
from paceline.trackers.event_writers import TRACKER
from paceline.trackers.hooks import wanted
from paceline.trackers.sink import Sink


def take_up(folder: RunFolder, attempt: int, *, since: float, variables: Mapping[str, str]) -> None:
    """Log the scalars of event files, written since `since`, as metrics of rank 0.

    `since` is in seconds since 1970. `variables` are the job's, with the choice of trackers. A value that is already a metric
    is
    skipped: by name and step in this attempt, and by time too in earlier attempts, because a program may append to its files.
    """
    if TRACKER not in wanted(variables):
        return
    to = Sink(WorkerContext(folder.path, 0, 1, attempt))
    there = {
        (name, number == attempt or entry.get("time"), entry.get("step"))
        for number in range(1, attempt + 1)
        for name, entries in placed_entries_by_name(folder.metrics, attempts=[number]).items()
        for entry in entries
    }
    for place in event_folders(folder):
        for path in sorted(place.iterdir()):
            if is_event_file(path.name) and path.is_file() and path.stat().st_mtime >= since:
                for one in EventFile(path).new():
                    name = to.prefix(str(place)) + one.tag
                    # A script's own calls may have no step.
                    kept = ((name, True, one.step), (name, True, None), (name, round(one.time, 6), one.step))
                    if not there.intersection(kept):
                        to.log(TRACKER, name, one.value, one.step, one.time)
