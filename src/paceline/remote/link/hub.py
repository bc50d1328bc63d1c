"""One thread that reads and writes all links of a process, and a few threads that store arriving files.

    any thread ── put ──> Outbox ┐                             ┌ answers at once: settle their requests
                                 ├ hub, one thread, one epoll ─┤
    nodes      <── frames ──────>┘                             └ files, events, answers in order ─> filers, some threads

A run on 1,000 nodes has 1,000 links: with threads of their own, switching between the threads would cost more than the frames.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.system import processes

#: Threads that store files. Several, because one file system may hang while another node's events wait.
_FILERS = 4
#: Descriptors from which on more than the usual 1,024 may be needed. Programs that a small run starts keep their limit.
_MANY = 256


class HubChannel(Protocol):
    """A connection as the hub sees it. The hub's thread calls all methods except `file_some`."""

    #: Whether the connection waits for the hub to write.
    is_queued: bool

    def on_ready(self, fd: int, events: int) -> None:
        """Read or write: a descriptor is ready."""

    def on_output(self) -> None:
        """Write queued frames."""

    def file_some(self) -> None:
        """Handle some frames that arrived, in a filer."""


class LinkHub:
    """The hub of a process, whose threads start with the first link."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._channels: dict[int, HubChannel] = {}
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._poll.register(self._wake, select.EPOLLIN)
        self._sleeps = False
        #: Connections with frames to write, and work for the hub's thread. Appending to a deque needs no lock.
        self._output: collections.deque[HubChannel] = collections.deque()
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._to_file: queue.SimpleQueue[HubChannel] = queue.SimpleQueue()
        for name, target in (("paceline-links", self._run), *[("paceline-files", self._file)] * _FILERS):
            threading.Thread(target=target, name=name, daemon=True).start()

    # --- called by any thread

    def call(self, work: Callable[[], None]) -> None:
        """Let the hub's thread call `work`."""
        self._work.append(work)
        self._rouse()

    def write_soon(self, channel: HubChannel) -> None:
        """Let the hub write the frames that a connection has queued."""
        if not channel.is_queued:
            channel.is_queued = True
            self._output.append(channel)
            self._rouse()

    def file_soon(self, channel: HubChannel) -> None:
        """Let a filer handle the frames that arrived on a connection."""
        self._to_file.put(channel)

    def _rouse(self) -> None:
        # The hub sets `_sleeps` before it looks at the deques for the last time, so no work is overlooked.
        if self._sleeps:
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker, b"\0")

    # --- called in the hub's thread

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        """Call `work` once, after so many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._count), work))

    def watch(self, channel: HubChannel, fd: int, events: int) -> None:
        """Call the connection when its descriptor is ready for these events of epoll."""
        self._channels[fd] = channel
        try:
            self._poll.modify(fd, events)
        except FileNotFoundError:
            self._poll.register(fd, events)
        if len(self._channels) == _MANY:
            processes.raise_open_files()

    def forget(self, fd: int) -> None:
        """Stop to watch a descriptor, which is still open."""
        self._channels.pop(fd, None)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)

    def _run(self) -> None:
        while True:
            self._sleeps = True
            for fd, events in self._poll.poll(self._idle_s(), 256):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                elif (channel := self._channels.get(fd)) is not None:
                    channel.on_ready(fd, events)
            self._sleeps = False
            self._work_off()

    def _idle_s(self) -> float:
        if self._work or self._output:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1.0

    def _work_off(self) -> None:
        while self._work:
            self._work.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        for _ in range(len(self._output)):
            channel = self._output.popleft()
            # Clear the flag first: a frame that is queued during the write calls `write_soon` again.
            channel.is_queued = False
            channel.on_output()

    def _file(self) -> None:
        while True:
            channel = self._to_file.get()
            channel.file_some()


_hubs: dict[int, LinkHub] = {}
_lock = threading.Lock()


def hub() -> LinkHub:
    """Return the hub of this process."""
    with _lock:
        # A forked child gets its own, because threads do not survive a fork.
        if (found := _hubs.get(os.getpid())) is None:
            _hubs.clear()
            found = _hubs[os.getpid()] = LinkHub()
        return found
