"""Event files that programs have left which are no Python of a worker's: a shell script's Python, or none at all.

Nobody listened to them while they ran. So their values are taken up at the attempt's end, where the workers' folder is the run's.
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
    """Keep the scalars of event files as metrics of rank 0: of those that were written to since then, in seconds since 1970.

    variables: the job's own, one of which says which trackers are listened to. A value that is among the metrics already is
    passed over: of this attempt by its name and step, of earlier ones, which a program may append to, by its time as well.
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
                    # A script that logs by itself may say no step.
                    kept = ((name, True, one.step), (name, True, None), (name, round(one.time, 6), one.step))
                    if not there.intersection(kept):
                        to.log(TRACKER, name, one.value, one.step, one.time)
