"""Create, index and limit the workers' logs for the supervisor.

logs/driver.log                 output of the supervisor (`runs.driver_log`)
attempts/<k>/rank_<n>.log       output of rank n, written by the worker or its children directly
attempts/<k>/log_order.txt      "time rank size" for each growth, for the merged view of all ranks
logs/rank_<n>.log               a link to the log of the newest attempt
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.job.plan import Launch
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.system import gaps
from paceline.system.files import write_whole

#: _STEADY_S: a change this soon after another may leave a folder's time equal. _AGAIN_S: list it at least so often.
_STEADY_S, _AGAIN_S = 2.0, 5.0
#: The pause after a check of the sizes of all logs lasts at least this many times as long as the check itself.
_PAUSE = 9
_RANK_LOG = re.compile(r"rank_(\d+)\.log", re.ASCII)


def make_logs(folder: RunFolder, launch: Launch) -> None:
    """Create empty logs for the attempt, and link `logs/rank_<n>.log` to them."""
    attempt, logs = str(folder.attempt(launch.attempt)), str(folder.logs)
    os.makedirs(attempt, exist_ok=True)
    beside = f"{logs}/.link"
    target = os.path.relpath(attempt, logs)
    for place in launch.places:
        name = f"rank_{place.rank}.log"
        os.close(os.open(f"{attempt}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        _link(f"{target}/{name}", beside, f"{logs}/{name}")


def _link(target: str, beside: str, path: str) -> None:
    try:
        os.symlink(target, path)
        return
    except FileExistsError:
        pass
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)  # a supervisor killed in this function may have left this link
    os.symlink(target, beside)
    try:
        # Rename over the old link, so that readers that follow the log always find a link.
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise


class NewFiles:
    """A detector of new files in a folder, without listing an unchanged folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._names: set[str] = set()
        self._changed_ns = -1
        self._again_s = 0.0

    def look(self) -> set[str]:
        """Return the names of files created since the last call."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
            now_s = time.time()
            # Coarse file times, or the cache of a network file system, may hide a new change: then list the folder again.
            if changed_ns == self._changed_ns and now_s < self._again_s and now_s - changed_ns / 1e9 > _STEADY_S:
                return set()
            self._changed_ns, self._again_s = changed_ns, now_s + _AGAIN_S
            names = set(os.listdir(self._folder))
        except OSError:
            return set()
        new, self._names = names - self._names, names
        return new


class LogWatch:
    """The writer of `log_order.txt`, which also keeps the workers' logs within their limit.

    keeps_limits: Whether to limit the logs; False if the logs are on the nodes' own disks, and the nodes limit them.
    grown: Returns the names of logs that grew since the last call, or None if that is not known.
    """

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        *,
        keeps_limits: bool,
        grown: Callable[[], set[str] | None] = lambda: None,
    ) -> None:
        self._grown, self._next_s = grown, 0.0
        self._folder, self._attempt = folder, launch.attempt
        self._limit = launch.job.log_limit if keeps_limits else 0
        self._paths: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._keepers: dict[int, gaps.Keeper] = {}
        for place in launch.places:
            self._add(place.rank)
        # The file is unbuffered and in append mode: readers see whole lines, and a killed supervisor loses no line.
        self._order = open(folder.log_order(launch.attempt), "ab", buffering=0)  # noqa: SIM115

    def look(self, new: Iterable[str]) -> None:
        """Write lines of `log_order.txt` for logs that have grown.

        new: Names of files that are new in the attempt's folder.
        """
        for name in new:
            if (found := _RANK_LOG.fullmatch(name)) and (rank := int(found[1])) not in self._paths:
                self._add(rank)
                logs = str(self._folder.logs)
                with contextlib.suppress(OSError):  # the disk is full: this log gets no link
                    _link(os.path.relpath(self._paths[rank], logs), f"{logs}/.link", f"{logs}/{name}")
        now_s, grown = time.monotonic(), self._grown()
        if grown is None and now_s < self._next_s:
            return
        if grown is None:
            ranks = list(self._paths)
        else:
            top = f"attempts/{self._attempt}/"
            names = (_RANK_LOG.fullmatch(name.removeprefix(top)) for name in grown if name.startswith(top))
            ranks = [rank for found in names if found and (rank := int(found[1])) in self._paths]
        lines = [line for rank in ranks if (line := self._grown_line(rank)) is not None]
        if lines:
            with contextlib.suppress(OSError):  # the disk is full: readers merge the logs' lines in a less exact order
                self._order.write("".join(lines).encode())
        # The next check waits `_PAUSE` times as long as this check, which takes a while with thousands of logs.
        self._next_s = now_s + _PAUSE * (time.monotonic() - now_s)

    def _grown_line(self, rank: int) -> str | None:
        try:
            size = os.stat(self._paths[rank]).st_size
        except OSError:
            return None
        if size == self._sizes[rank]:
            return None
        self._sizes[rank] = size
        self._keep_limit(rank)
        return f"{time.time():.3f} {rank} {size}\n"

    def close(self) -> None:
        """Write the last lines of `log_order.txt`, and close the file."""
        self._next_s = 0.0
        self.look(())
        self._order.close()

    def _add(self, rank: int) -> None:
        path = self._paths[rank] = str(self._folder.rank_log(self._attempt, rank))
        self._sizes[rank] = 0
        if self._limit:
            self._keepers[rank] = gaps.Keeper(path, self._limit)

    def _keep_limit(self, rank: int) -> None:
        if (keeper := self._keepers.get(rank)) is None:
            return
        keeper.look()
        if keeper.trouble is not None:
            del self._keepers[rank]
            say(f"rank {rank}'s log is kept whole: its file system can't leave anything out of it ({keeper.trouble})")


def shorten_logs(folder: RunFolder, attempt: int) -> None:
    """Remove holes from an ended attempt's truncated logs, and correct `log_order.txt`."""
    closed = {}
    for path in folder.attempt(attempt).glob("gap_*.json"):
        if (
            (log := gaps.log_of(str(path)))
            and (found := _RANK_LOG.fullmatch(os.path.basename(log)))
            and (gap := gaps.close(log))
        ):
            closed[found[1]] = gap
    if not closed:
        return
    order = folder.log_order(attempt)
    with contextlib.suppress(OSError):  # the disk is full: readers merge the lines of all ranks in a less exact order
        lines = []
        for line in order.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[1] in closed:
                words[2] = str(closed[words[1]].place(int(words[2])))
            lines.append(" ".join(words) + "\n")
        write_whole(order, "".join(lines))
