"""Live changes of a run for the web page: the server polls the run's files once for all browsers that show it.

    state     the run's record has changed
    log       lines of the workers
    points    values of metrics
    other     new rows, tables or images
    side      new output of the supervisor, or of a node in preparation

These are the names of the events. A feed runs while browsers watch it, and ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs import read, store
from paceline.runs.folder import RunFolder
from paceline.runs.log_start import last_lines_start
from paceline.runs.logs import LogFollower
from paceline.runs.record import RunRecord
from paceline.ui.banners import SlowRanks, shown_state, slow_ranks
from paceline.ui.curves import READ_S, CurveStore, Key, finite
from paceline.ui.log_view import line_json

#: Seconds to wait after a poll of the files that found new values; seconds to wait after a poll that found none.
_LOOK_S, _IDLE_S = 0.1, 0.2
#: Seconds between polls of the run's record. A poll may have to query an engine such as Slurm.
_STATE_S = 0.5
#: Maximum number of log lines to send to a new watcher, and after one poll. The feed skips all earlier lines.
TAIL = 500
#: Maximum number of new values of a curve to send. If there are more, the page requests the whole curve.
_MOST_POINTS = 2000
#: Maximum seconds between two messages, because a proxy closes an idle connection.
_SILENCE_S = 15.0
#: Maximum number of messages in a watcher's queue. If the queue is full, the server disconnects the watcher's page.
_MOST_WAITING = 300


def message(event: str, data: object, place: str = "") -> bytes:
    """Return a server-sent event as bytes. place: the event's id, or ""."""
    head = f"id: {place}\n" if place else ""
    return f"{head}event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class RunFeed:
    """The live changes of a run, for all browsers watching it.

    Call its methods only in the event loop.
    """

    def __init__(self, folder: RunFolder, curves: CurveStore) -> None:
        self.folder = folder
        self._curves = curves
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._record: RunRecord | None = None
        self._slow: SlowRanks | None = None
        self._follower: LogFollower | None = None
        self._lines: deque[tuple[int, list[object]]] = deque(maxlen=TAIL)
        self._number = 0
        #: Random id of this feed. Line numbers are valid only in one feed, because the next feed of the run counts from 0.
        self._epoch = os.urandom(4).hex()
        self._sent: dict[Key, int] = {}
        self._size, self._others = -1, 0
        #: Whether the logs have values that the feed has not read yet.
        self._has_more = False
        self._side_bytes = 0
        self._is_over = False
        #: Lock for starting the feed: of several watchers that come at the same time, only the first starts it.
        self._beginning = asyncio.Lock()
        #: Whether the last watcher has left, or the run has ended. The next watcher then gets a new feed.
        self.is_idle = False

    async def watch(self, place: str) -> AsyncGenerator[bytes, None]:
        """Yield an event with a run's last log lines, then its new events.

        place: Id of the last event that the browser received before it reconnected, or "".
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        async with self._beginning:
            if self._task is None:
                self.is_idle = False
                beginning = asyncio.ensure_future(asyncio.to_thread(self._begin))
                try:
                    await asyncio.shield(beginning)
                except asyncio.CancelledError:
                    # The watcher has left while the thread opens logs. Close the logs only after the thread has ended.
                    await asyncio.wait([beginning])
                    self.close()
                    raise
                self._task = asyncio.create_task(self._go())
        epoch, _, number = place.partition(":")
        seen = int(number) if epoch == self._epoch and number.isdecimal() else -1
        first = [line for at, line in self._lines if at > seen]
        # If the page has all earlier lines, it appends these lines. Otherwise it first clears the lines that it shows.
        is_gap = seen < 0 or (bool(self._lines) and seen < self._lines[0][0] - 1)
        queue.put_nowait(b"retry: 700\n" + message("log", {"lines": first, "reset": is_gap}, self._place))
        queue.put_nowait(message("points", [_point_of(key, count) for key, count in self._sent.items()]))
        if self._record is not None:
            queue.put_nowait(message("state", state_json(self._record, self._slow)))
        if self._is_over:
            queue.put_nowait(message("end", {}))
            queue.put_nowait(None)
        # The code above has no `await`, so no event can arrive before this line, and the new watcher misses no event.
        self._watchers.add(queue)
        try:
            while (sent := await queue.get()) is not None:
                yield sent
        finally:
            self._watchers.discard(queue)

    @property
    def _place(self) -> str:
        return f"{self._epoch}:{self._number}"

    def _begin(self) -> None:
        if self._follower is not None:
            return
        self._record = read.record(self.folder)
        ranks = [*self.folder.ranks(self._record.world_size)]
        attempts = [attempt.number for attempt in self._record.attempts]
        start = last_lines_start(self.folder, attempts, ranks, TAIL, unended=False)
        self._follower = LogFollower(self.folder, None, start)
        self._log_events(self._record)
        self._point_events()

    async def _go(self) -> None:
        states = asyncio.create_task(self._follow_state())
        spoke = time.monotonic()
        try:
            while self._watchers or not self._is_over:
                record = self._record
                assert record is not None, "it was read at the start"
                # The record was read before the files. If it says that the run has ended, this call reads the files to their end.
                events = await asyncio.to_thread(self._events, record)
                if not events and time.monotonic() - spoke > _SILENCE_S:
                    # Send a sign of life to all watchers together, because a timer for each watcher would cost more.
                    events = [b": still here\n\n"]
                if events:
                    spoke = time.monotonic()
                    self._tell(b"".join(events))
                if record.is_terminal and not self._has_more:
                    self._is_over = True
                    self._tell(message("state", state_json(record)))
                    self._tell(message("end", {}))
                    for queue in self._watchers:
                        with contextlib.suppress(asyncio.QueueFull):
                            queue.put_nowait(None)
                    return
                if not self._watchers:
                    return
                await asyncio.sleep(_LOOK_S if events else _IDLE_S)
        finally:
            states.cancel()
            self.close()

    async def _follow_state(self) -> None:
        while True:
            await asyncio.sleep(_STATE_S)
            try:
                record = await asyncio.to_thread(read.record, self.folder)
                slow = await asyncio.to_thread(slow_ranks, self.folder, record)
            except (PacelineError, OSError):
                continue
            if record != self._record or slow != self._slow:
                self._slow = slow
                if not record.is_terminal:
                    self._tell(message("state", state_json(record, slow)))
                self._record = record

    def close(self) -> None:
        self._task, self.is_idle = None, True
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        for queue in self._watchers:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    def _tell(self, event: bytes) -> None:
        for queue in [*self._watchers]:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._watchers.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)

    def _events(self, record: RunRecord) -> list[bytes]:
        return [*self._log_events(record), *self._point_events(), *self._side_events(record)]

    def _log_events(self, record: RunRecord) -> list[bytes]:
        assert self._follower is not None, "it was made at the start"
        fresh: deque[list[object]] = deque(maxlen=TAIL)
        came = 0
        for line in self._follower.new(len(record.attempts), is_over=record.is_terminal):
            came += 1
            fresh.append(line_json(line))
        if not came:
            return []
        for line_data in fresh:
            self._number += 1
            self._lines.append((self._number, line_data))
        return [message("log", {"lines": [*fresh], "left_out": max(0, came - TAIL)}, self._place)]

    def _side_events(self, record: RunRecord) -> list[bytes]:
        nodes = record.job.node_count if record.job else 1
        size = 0
        for path in (self.folder.driver_log, *map(self.folder.prepare_log, range(nodes))):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
        if size == self._side_bytes:
            return []
        self._side_bytes = size
        return [message("side", {})]

    def _point_events(self) -> list[bytes]:
        told = []
        with self._curves.open(self.folder) as curves:
            curves.look(READ_S)
            self._has_more = curves.has_more
            # Compare counts, because a page's request may have read the new values already. While a large log is being
            # read, a page requests its curves again by itself.
            size = self._size if self._has_more else curves.size
            is_same, self._size = size == self._size, size
            for key, curve in () if is_same else curves.curves.items():
                before, now = self._sent.get(key, 0), len(curve.ys)
                if now > before:
                    # For a new curve, or many new values, send only their number. The page then requests the thinned curve.
                    first = before if 0 < before >= now - _MOST_POINTS else now
                    xs = curve.xs("step", 0.0)
                    points = {"x": [finite(x) for x in xs[first:now]], "y": [finite(y) for y in curve.ys[first:now]]}
                    told.append({**_point_of(key, now), **points})
                    self._sent[key] = now
            count = curves.other_count
        events = [message("points", told)] if told else []
        if count != self._others:
            self._others = count
            events.append(message("other", {"count": count}))
        return events


class RunFeeds:
    """The `RunFeed` of each run that a browser watches."""

    def __init__(self, runs_dir: Path, curves: CurveStore) -> None:
        self._runs_dir, self._curves = runs_dir, curves
        self._feeds: dict[str, RunFeed] = {}

    def of(self, run_id: str) -> RunFeed:
        for other, feed in [*self._feeds.items()]:
            if feed.is_idle:
                del self._feeds[other]
        if run_id not in self._feeds:
            self._feeds[run_id] = RunFeed(store.find(self._runs_dir, run_id), self._curves)
        return self._feeds[run_id]


def state_json(record: RunRecord, slow: SlowRanks | None = None) -> dict[str, object]:
    """Return the values of a run that its web page's header shows."""
    return {
        "shown": shown_state(record),
        "slow": slow.text if slow else "",
        "status": record.status,
        "waiting_for": record.waiting_for,
        "started_utc": record.started_utc,
        "ended_utc": record.ended_utc,
        "is_terminal": record.is_terminal,
        "attempts": len(record.attempts),
        "has_failure": record.failure is not None,
        "warnings": len(record.warnings),
    }


def _point_of(key: Key, count: int) -> dict[str, object]:
    return {"name": key.name, "rank": key.rank, "attempt": key.attempt, "node": int(key.is_node), "n": count}
