"""Detect hangs: no output for `hang_seconds`, and no worker makes progress.

output or a metric arrives  ->  the workers are not examined
silence for hang_seconds    ->  three stack dumps of all workers, some seconds apart (`wait_graph.gets_on`)
    a worker progresses     ->  try again after a while; withdraw an earlier report of a hang
    no worker progresses    ->  write the report, note the time in the record, and follow `on_hang`
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from paceline.job.plan import Launch
from paceline.observe.node.messages import WorkersReport
from paceline.observe.stack_dumps import Looks
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport, logs_command
from paceline.runs.folder import RunFolder
from paceline.runs.record import Hang, utc_now
from paceline.system.files import append_line, write_json, write_whole

if TYPE_CHECKING:
    from paceline.observe.stacks import RunStacks

#: Seconds between two stack dumps to compare: a fraction of `hang_seconds`, but within these two bounds.
_SHORTEST_S, _LONGEST_S = 1.0, 10.0
#: Minimum seconds between two checks of the sizes of logs and metrics.
_SIZES_S = 5.0
_SHOWN = 3


class HangWatch:
    """A hang detector for one attempt.

    note: Called with each detected hang, and with None once the hang has ended.
    """

    def __init__(self, launch: Launch, folder: RunFolder, looks: Looks, note: Callable[[Hang | None], None]) -> None:
        self._launch, self._folder, self._looks, self._note = launch, folder, looks, note
        self._limit_s = launch.job.hang_seconds
        self._pause_s = min(max(self._limit_s / 20, _SHORTEST_S), _LONGEST_S)
        self._sizes: dict[str, int] = {}
        self._last_s = time.monotonic()
        self._last_utc = utc_now()
        self._next_sizes = self._next_look = 0.0
        self._is_looking = False
        self._first: WorkersReport | None = None
        self._hangs = False
        #: How many comparisons of successive stack dumps, in a row, have shown no progress.
        self._still = 0
        #: The report of a hang that must end the attempt, because of the job's `on_hang`.
        self.failure: FailureReport | None = None

    def look(self) -> None:
        """Check for new output or metrics. After `hang_seconds` without any, dump all stacks."""
        now = time.monotonic()
        if not self._limit_s or now < self._next_sizes:
            return
        self._next_sizes = now + min(_SIZES_S, self._limit_s / 20)
        if self._has_grown():
            self._last_s, self._last_utc = now, utc_now()
            self._first, self._still = None, 0
            self._get_on("output or a metric has come")
            return
        if now - self._last_s < self._limit_s or now < self._next_look or self._is_looking:
            return
        self._is_looking = True
        self._looks.begin(self._take)

    def _take(self, told: WorkersReport) -> None:
        now = time.monotonic()
        self._is_looking = False
        if now - self._last_s < self._limit_s:
            return
        if self._first is None:
            self._first, self._next_look = told, now + self._pause_s
            return
        # Import these modules only here, because few runs are silent for so long that they are needed.
        from paceline.observe.stacks import RunStacks
        from paceline.observe.wait_graph import gets_on

        first, self._first = self._first, None
        self._next_look = now + max(self._pause_s, self._limit_s / 4)
        if (why := gets_on(first, told)) is not None:
            self._still = 0
            self._get_on(why)
        elif not self._hangs and self._still == 0:
            # Take a third dump before reporting a hang: in two dumps, a loop may be at the same line by chance.
            self._still, self._first, self._next_look = 1, told, now + self._pause_s
        elif not self._hangs:
            self._still = 0
            self._hangs = True
            self._report(RunStacks(told))

    def _get_on(self, why: str) -> None:
        if self._hangs:
            self._hangs = False
            say(f"the run gets on again: {why}")
            self._record("until_utc", utc_now())
            self._note(None)

    def _record(self, name: str, time_utc: str) -> None:
        with contextlib.suppress(OSError):  # ignore a full disk, which the modules that write logs report
            append_line(self._folder.hangs(self._launch.attempt), {name: time_utc})

    def _report(self, stacks: RunStacks) -> None:
        text = hang_text(stacks)
        path = self._folder.hang_report(self._launch.attempt)
        # A later hang replaces the report of an earlier one.
        with contextlib.suppress(OSError):  # ignore a full disk, which the modules that write logs report
            write_whole(path, f"Nothing has come since {self._last_utc}.\n{text}\n\n{stacks}\n")
            write_json(path.with_suffix(".json"), stacks.to_json())
        say(f"the run hangs: nothing has come since {self._last_utc}. {text}")
        self._record("since_utc", self._last_utc)
        self._note({"since_utc": self._last_utc, "text": text, "report": str(path.relative_to(self._folder.path))})
        if self._launch.job.on_hang != "report":
            self.failure = FailureReport(
                cause="hang",
                message=f"The run hung: nothing came for {time.monotonic() - self._last_s:.0f} s, and no worker got on. {text}",
                attempt=self._launch.attempt,
                see=logs_command(self._launch.run_id),
            )

    def _has_grown(self) -> bool:
        sizes: dict[str, int] = {}
        for folder in (self._folder.metrics, self._folder.attempt(self._launch.attempt)):
            with contextlib.suppress(OSError), os.scandir(folder) as found:
                # Skip the nodes' load logs, which grow even if the workers hang.
                sizes |= {entry.path: entry.stat().st_size for entry in found if entry.name.startswith("rank_")}
        grown, self._sizes = sizes != self._sizes, sizes
        return grown


class LostWait:
    """A search for workers that wait for `lost` ranks in a collective, and so can't handle SIGTERM.

    Attributes:
        stuck: The ranks that the last two stack dumps have shown to wait so.
    """

    def __init__(self, looks: Looks, lost: Collection[int]) -> None:
        self._looks, self._lost = looks, lost
        self.stuck: set[int] = set()
        self._last: WorkersReport | None = None
        # Most workers end at once after SIGTERM. Don't start a program on each node for them.
        self._pause_s, self._next_s = _SHORTEST_S, time.monotonic() + _SHORTEST_S / 4

    def look(self) -> None:
        """Take two stack dumps a second apart, and further ones more and more rarely."""
        self._looks.look()
        if time.monotonic() >= self._next_s:
            self._next_s = math.inf
            self._looks.begin(self._take)

    def _take(self, told: WorkersReport) -> None:
        from paceline.observe.wait_graph import stuck_ranks

        if self._last is not None:
            self.stuck = stuck_ranks(self._last, told, self._lost)
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        self._last, self._next_s = told, time.monotonic() + self._pause_s


def hang_text(stacks: RunStacks) -> str:
    """Return the reason for a hang in a few sentences; if unknown, what each rank does."""
    said = stacks.waiting or stacks.places
    more = f" And {len(said) - _SHOWN} more." if len(said) > _SHOWN else ""
    return " ".join(said[:_SHOWN]) + more
