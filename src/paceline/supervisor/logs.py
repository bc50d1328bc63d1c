"""Create, index and limit the workers' logs for the supervisor.

logs/driver.log                 output of the supervisor (`runs.driver_log`)
attempts/<k>/rank_<n>.log       output of rank n, written by the worker or its children directly
attempts/<k>/log_order.txt      "time rank size" for each growth, for the merged view of all ranks
logs/rank_<n>.log               a link to the log of the newest attempt
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from paceline.job.plan import Launch
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.system import gaps
from paceline.system.files import write_whole


def make_logs(folder: RunFolder, launch: Launch) -> None:
    """Create empty logs for the attempt, and link `logs/rank_<n>.log` to them."""
    folder.attempt(launch.attempt).mkdir(parents=True, exist_ok=True)
    for place in launch.places:
        folder.rank_log(launch.attempt, place.rank).touch()
        _link(folder, launch.attempt, place.rank)


def _link(folder: RunFolder, attempt: int, rank: int) -> None:
    live = folder.live_log(rank)
    beside = live.with_name(f".{live.name}")
    beside.unlink(missing_ok=True)  # left by a supervisor that was killed during this function
    beside.symlink_to(os.path.relpath(folder.rank_log(attempt, rank), folder.logs))
    # Rename over the old link, so that readers that follow the log always find a link.
    os.replace(beside, live)


class LogWatch:
    """An index of growing logs, which also keeps each within the job's limit.

    keeps_limits: False if the nodes have logs of their own and limit them there.
    """

    def __init__(self, launch: Launch, folder: RunFolder, *, keeps_limits: bool) -> None:
        self._folder, self._attempt = folder, launch.attempt
        self._limit = launch.job.log_limit if keeps_limits else 0
        self._paths: dict[int, Path] = {}
        self._sizes: dict[int, int] = {}
        self._keepers: dict[int, gaps.Keeper] = {}
        for place in launch.places:
            self._add(place.rank)
        # The file is unbuffered and in append mode: readers see whole lines, and a killed supervisor loses no line.
        self._order = open(folder.log_order(launch.attempt), "ab", buffering=0)  # noqa: SIM115

    def look(self) -> None:
        """Index each log that has grown, including ranks that a script has started."""
        for rank in self._folder.ranks_with_log(self._attempt):
            if rank not in self._paths:
                self._add(rank)
                with contextlib.suppress(OSError):  # the disk is full: do without this link to the log
                    _link(self._folder, self._attempt, rank)
        for rank, path in self._paths.items():
            try:
                size = os.stat(path).st_size
            except OSError:
                continue
            if size != self._sizes[rank]:
                self._sizes[rank] = size
                with contextlib.suppress(OSError):  # the disk is full: the merged view orders these lines less exactly
                    self._order.write(f"{time.time():.3f} {rank} {size}\n".encode())
                self._keep_limit(rank)

    def close(self) -> None:
        """Close the index."""
        self._order.close()

    def _add(self, rank: int) -> None:
        path = self._paths[rank] = self._folder.rank_log(self._attempt, rank)
        self._sizes[rank] = 0
        if self._limit:
            self._keepers[rank] = gaps.Keeper(str(path), self._limit)

    def _keep_limit(self, rank: int) -> None:
        if (keeper := self._keepers.get(rank)) is None:
            return
        keeper.look()
        if keeper.trouble is not None:
            del self._keepers[rank]
            say(f"rank {rank}'s log is kept whole: its file system can't leave anything out of it ({keeper.trouble})")


def shorten_logs(folder: RunFolder, attempt: int) -> None:
    """Close the gaps in an ended attempt's logs, and correct the index."""
    closed = {}
    for rank in folder.ranks_with_log(attempt):
        if gap := gaps.close(str(folder.rank_log(attempt, rank))):
            closed[str(rank)] = gap
    if not closed:
        return
    order = folder.log_order(attempt)
    with contextlib.suppress(OSError):  # the disk is full: the merged view orders lines less exactly
        lines = []
        for line in order.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[1] in closed:
                words[2] = str(closed[words[1]].place(int(words[2])))
            lines.append(" ".join(words) + "\n")
        write_whole(order, "".join(lines))
