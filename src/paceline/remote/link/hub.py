"""One thread that reads and writes all links of a process, and one that stores arriving files.

    any thread ── put ──> Outbox ┐                             ┌ immediate answers: settle their requests
                                 ├ hub: one thread, one epoll ─┤
    nodes      <── frames ──────>┘                             └ files, events, answers in order ─> filer

A run on 1,000 nodes has 1,000 links. If each link had own threads, the switches between threads would cost more time
than the frames.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.system import processes

log = logging.getLogger(__name__)

#: With this many descriptors, raise the limit of open files, usually 1,024. Programs of smaller runs keep their limit.
_MANY = 128
#: From `_MANY` descriptors on, pause for so long before each `poll`, which then returns the messages of many nodes.
_PAUSE_S = 0.001


class HubChannel(Protocol):
    """A connection that `LinkHub` serves. Its first thread calls all methods but `file_some`."""

    #: Whether the connection is in the hub's list of connections to write.
    is_queued: bool

    def on_ready(self, fd: int, events: int) -> None:
        """Read from or write to `fd`, which is ready."""

    def on_output(self) -> None:
        """Write the messages that are queued."""

    def file_some(self) -> None:
        """Handle some received messages, in the thread that stores files."""


class LinkHub:
    """Two threads for all links: the hub transfers messages, the filer stores files."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._channels: dict[int, HubChannel] = {}
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._poll.register(self._wake, select.EPOLLIN)
        self._sleeps = False
        #: Connections with frames to write, and functions for the hub's thread to call. Appending to a deque needs no lock.
        self._output: collections.deque[HubChannel] = collections.deque()
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._to_file: queue.SimpleQueue[HubChannel] = queue.SimpleQueue()
        # The first thread transfers frames and never waits for a disk. The second stores the files of all links.
        for name, target in (("paceline-links", self._run), ("paceline-files", self._file)):
            threading.Thread(target=target, name=name, daemon=True).start()

    # --- methods for any thread

    def call(self, work: Callable[[], None]) -> None:
        """Call `work` soon, in the hub's thread."""
        self._work.append(work)
        self._rouse()

    def write_soon(self, channel: HubChannel) -> None:
        """Let the hub write the messages that a connection has queued."""
        if not channel.is_queued:
            channel.is_queued = True
            self._output.append(channel)
            self._rouse()

    def file_soon(self, channel: HubChannel) -> None:
        """Let the file thread handle messages that a connection has received."""
        self._to_file.put(channel)

    def _rouse(self) -> None:
        # If the hub sleeps, wake it by a byte. It sets `_sleeps`, then checks the deques again, so it misses no work.
        # Only the thread that clears `_sleeps` writes a byte. With a byte for each frame, the hub would wake for each.
        if self._sleeps:
            self._sleeps = False
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker, b"\0")

    # --- methods for the hub's thread

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        """Call `work` once, after a delay."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._count), work))

    def watch(self, channel: HubChannel, fd: int, events: int) -> None:
        """Call `channel.on_ready` whenever one of these epoll events happens to a descriptor."""
        self._channels[fd] = channel
        try:
            self._poll.modify(fd, events)
        except FileNotFoundError:
            self._poll.register(fd, events)
        if len(self._channels) == _MANY:
            processes.raise_open_files()

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor, before it is closed."""
        self._channels.pop(fd, None)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)

    def _run(self) -> None:
        while True:
            if len(self._channels) >= _MANY:
                time.sleep(_PAUSE_S)
            self._sleeps = True
            ready = self._poll.poll(self._idle_s(), 256)
            self._sleeps = False
            for fd, events in ready:
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                elif (channel := self._channels.get(fd)) is not None:
                    _call(channel.on_ready, fd, events)
            self._work_off()

    def _idle_s(self) -> float:
        if self._work or self._output:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1.0

    def _work_off(self) -> None:
        for _ in range(len(self._work)):
            _call(self._work.popleft())
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _call(heapq.heappop(self._timers)[2])
        for _ in range(len(self._output)):
            channel = self._output.popleft()
            # Clear the flag first: `write_soon` must queue the channel again for frames that come during the write.
            channel.is_queued = False
            _call(channel.on_output)

    def _file(self) -> None:
        while True:
            _call(self._to_file.get().file_some)


def _call(work: Callable[..., None], *values: int) -> None:
    try:
        work(*values)
    except Exception:  # one link's error must not end this thread, which serves all links
        log.exception("a link could not be served")


#: Pid -> the hub of that process. Tests simulate several processes, which share this module.
_hubs: dict[int, LinkHub] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    # Threads do not survive a fork, so a forked process gets its own hub. Another thread may have held the lock.
    global _lock
    _lock = threading.Lock()
    _hubs.clear()


os.register_at_fork(after_in_child=_after_fork)


def hub() -> LinkHub:
    """Return the hub of this process. Start its threads at the first call."""
    with _lock:
        if (found := _hubs.get(os.getpid())) is None:
            found = _hubs[os.getpid()] = LinkHub()
        return found
