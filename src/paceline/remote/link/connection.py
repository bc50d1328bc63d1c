"""The connection of a link, which carries requests, answers, events and pings as frames.

    any thread   ask          -> Outbox      -> hub     -> the node
    hub          on_ready     <-                        <- the node
                   an immediate answer: settles its request
                   events, answers in order  -> _inward -> a filer: stores files, calls `hear`

The hub (`paceline.remote.link.hub`) pauses a connection only if `_inward` is full, so answers and pings overtake files. An
answer "in order" must not overtake earlier files, so a filer delivers it. When the connection ends, it records the reason, ends
the program and puts None into `_inward`. Pending requests end after the filer, which may still answer some.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.remote.agent.send_queue import Outbox
from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.hub import hub
from paceline.remote.link.messages import LinkError, Pending, Requests
from paceline.remote.wire import PING, Frame, Frames, Header, WireError, ping_s
from paceline.system import processes

#: The most received frames that wait for a filer, at most 16 MiB together, and how many a filer handles at a time.
_WAITING, _AT_A_TIME = 64, 32
#: Bytes that are written at a time: an urgent frame has to wait for them.
_WRITE_BYTES = 1 << 16
#: How many such writes a connection does before the hub serves the others.
_WRITES = 16
#: Seconds after the end of a connection in which its frames are stored before its requests end.
_FILING_S = 5.0


class AgentConnection:
    """A connection to an agent, which the hub reads and writes after `start`.

    hear: A callback that receives each frame that is not an answer, in order.
    on_lost: A callback for the end of the connection.

    The hub's thread receives and sends frames, and a filer calls `hear`, which may take long. Other threads call `ask` and
    wait for the answer.
    """

    def __init__(
        self,
        ends: Ends,
        name: str,
        silence_s: float,
        hear: Callable[[Header, bytes], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.lost: str | None = None
        # Times of the last received bytes, and of the last request that timed out. Comparing two numbers needs no lock.
        self._heard = self._waited_in_vain = time.monotonic()
        self._sent = self._heard
        self.out = Outbox(self._write_soon)
        self.requests = Requests()
        self._ends, self._name, self._silence_s, self._hear = ends, name, silence_s, hear
        self._on_lost = on_lost
        self._frames = Frames()
        self._inward: collections.deque[Frame | None] = collections.deque()
        #: Guards whether a filer has this connection, and whether it pauses.
        self._lock = threading.Lock()
        self._is_filing = self._is_paused = False
        self._hub, self._unsent = hub(), b""
        self._wants_write = self._has_ended = False
        #: Whether the hub has this connection in its list of those that have to write.
        self.is_queued = True
        #: Whether this side has closed the connection, so that its end does not count as a loss of the node.
        self.is_closing = False
        self._over, self._filed = threading.Event(), threading.Event()

    def start(self, first: bytes) -> None:
        """Let the hub serve the connection, of which `first` was read already."""
        ends = self._ends
        for fd in {ends.read_fd, ends.write_fd}:
            os.set_blocking(fd, False)
        self._hub.call(partial(self._guarded, partial(self._begin, first)))

    def ask(self, op: str, data: bytes = b"", *, timeout_s: float = 10.0, **values: Any) -> Frame:
        """Send a request and return the answer.

        Raises:
            LinkError: The node is lost, or does not answer in time.
            OSError: The agent's error.
        """
        return self.answer(self.send(op, values, data), op, timeout_s)

    def send(self, op: str, values: Mapping[str, object], data: bytes = b"") -> Pending:
        """Send a request, and return at once."""
        pending = self.requests.new()
        self.out.put({"op": op, "id": pending.number, **values}, data)
        return pending

    def answer(self, pending: Pending, op: str, timeout_s: float) -> Frame:
        """Wait for the answer to a request of `send`. Raise the errors of `ask`."""
        try:
            return self.wait_for(pending, op, timeout_s)
        finally:
            if not pending.is_done:
                self._waited_in_vain = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether an answer timed out and nothing arrived since, so that further requests are pointless."""
        return self._waited_in_vain > self._heard

    def wait_for(self, pending: Pending, what: str, timeout_s: float | None) -> Frame:
        if not pending.wait(timeout_s):
            self.requests.forget(pending)
            raise LinkError(f"{self._name}: no answer to {what!r} within {timeout_s:g} s.")
        if pending.answer is None:
            raise LinkError(self.lost or f"{self._name}: the link is closed.", self._ends.stderr())
        if error := pending.answer[0].get("error"):
            number, text, path = error
            raise OSError(number, text, path) if path else OSError(number, text)
        return pending.answer

    def give_up(self) -> None:
        """Release a connection that was never started."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            if self._ends.write_fd != self._ends.read_fd:
                os.close(self._ends.write_fd)
                self._ends.write_fd = self._ends.read_fd
        self._end_program(0.1)
        self._close_fds()

    def close(self, wait_s: float) -> None:
        """End the connection from this side. The agent ends on a request or when the link closes."""
        self.is_closing = True
        self.out.finish()
        if not self._over.wait(wait_s):
            self._hub.call(partial(self._end, lambda: "closed"))
            self._over.wait(4.0)
        self._filed.wait(_FILING_S)

    # --- in the hub's thread

    def _begin(self, first: bytes) -> None:
        ends = self._ends
        self.is_queued = False
        self._heard = self._sent = time.monotonic()
        self._watch()
        if ends.stderr_fd is not None:
            self._hub.watch(self, ends.stderr_fd, select.EPOLLIN)
        self._hub.after(min(1.0, self._silence_s / 4), partial(self._guarded, self._tick))
        self._take(first)
        self._hub.write_soon(self)

    def _watch(self) -> None:
        """Register the events that this connection waits for."""
        ends = self._ends
        reads = select.EPOLLIN * (not self._is_paused)
        writes = select.EPOLLOUT * self._wants_write
        if ends.read_fd == ends.write_fd:
            self._hub.watch(self, ends.read_fd, reads | writes)
            return
        self._hub.watch(self, ends.read_fd, reads)
        # epoll reports the other end's close of a pipe, even if nothing is to be written.
        if writes:
            self._hub.watch(self, ends.write_fd, writes)
        else:
            self._hub.forget(ends.write_fd)

    def on_ready(self, fd: int, events: int) -> None:
        self._guarded(partial(self._serve, fd, events))

    def _serve(self, fd: int, events: int) -> None:
        if fd == self._ends.stderr_fd:
            if not self._ends.hear_stderr():
                self._hub.forget(fd)
            return
        if events & select.EPOLLOUT or (fd == self._ends.write_fd != self._ends.read_fd):
            self._write()
        if fd == self._ends.read_fd and events & ~select.EPOLLOUT and not self._has_ended:
            self._read()

    def on_output(self) -> None:
        self._guarded(self._write)

    def _write(self) -> None:
        try:
            for _ in range(_WRITES):
                if not self._unsent and not self._fill():
                    break
                self._unsent = self._unsent[os.write(self._ends.write_fd, self._unsent) :]
                self._sent = time.monotonic()
            else:
                self._write_soon()
            wants = False
        except BlockingIOError:
            wants = True
        except OSError:
            # The reading side finds out why the connection has ended.
            self.out.drop()
            wants = False
        if wants != self._wants_write:
            self._wants_write = wants
            self._watch()

    def _fill(self) -> bool:
        """Take the next frames to write. Return whether there are any."""
        parts, size = [], 0
        while size < _WRITE_BYTES and (data := self.out.take()) is not None:
            parts.append(data)
            size += len(data)
        self._unsent = b"".join(parts)
        return bool(parts)

    def _read(self) -> None:
        try:
            data = os.read(self._ends.read_fd, 1 << 18)
        except BlockingIOError:
            return
        if not data:
            self._end(self._why_ended)
            return
        self._heard = time.monotonic()
        # Most messages of a node are pings.
        if data != PING or self._frames.is_torn:
            self._take(data)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call `work`, unless the connection has ended. An error ends this connection, never the hub."""
        if self._has_ended:
            return
        try:
            work()
        except WireError as error:
            self._end(partial(str, f"what came is not an agent's: {error}"))
        except OSError as error:
            self._end(partial(str, f"the link broke: {error.strerror or error}"))
        except Exception as error:
            self._end(partial(str, f"the link failed: {error!r}"))

    def _take(self, data: bytes) -> None:
        # Any received byte proves that the node lives, so a ping has no content.
        for header, content in self._frames.feed(data):
            if header.get("op") == "ping":
                continue
            pending = self.requests.find(header["re"]) if "re" in header else None
            if pending is None or pending.in_order:
                self._put_inward((header, content))
            else:
                self.requests.settle(header["re"], (header, content))
        with self._lock:
            # A filer compares the length under the lock too, so it can't empty the queue unnoticed in between.
            pauses = len(self._inward) >= _WAITING
            self._is_paused = self._is_paused or pauses
        if pauses:
            self._watch()

    def _tick(self) -> None:
        """Send a ping after a pause, and end the connection after a long silence."""
        now = time.monotonic()
        if self._is_paused:
            # Nothing is read from the node now, because its earlier files are still being stored.
            self._heard = now
        if now - self._heard > self._silence_s:
            # This process may have been held up itself: bytes that arrived meanwhile prove that the node lives.
            self._read()
        if now - self._heard > self._silence_s:
            self._end(partial(str, f"nothing heard for {self._silence_s:g} s."))
            return
        pause_s = ping_s(self._silence_s)
        if now - self._sent >= pause_s:
            self.out.put({"op": "ping"})
        # Look again when a ping would be due, or the silence would be too long.
        due_s = min(self._sent + pause_s, self._heard + self._silence_s) - now
        self._hub.after(max(due_s, pause_s / 4), partial(self._guarded, self._tick))

    def _write_soon(self) -> None:
        self._hub.write_soon(self)

    # --- filing

    def _put_inward(self, found: Frame | None) -> None:
        with self._lock:
            self._inward.append(found)
            if self._is_filing:
                return
            self._is_filing = True
        self._hub.file_soon(self)

    def file_some(self) -> None:
        """Handle some frames that arrived, in a filer, and ask for another turn if more are left."""
        try:
            for _ in range(min(_AT_A_TIME, len(self._inward))):
                self._handle(self._inward.popleft())
        except Exception as error:  # the frames of other connections need this thread
            self._hub.call(partial(self._end, partial(str, f"what came can't be handled: {error!r}")))
        with self._lock:
            self._is_filing = bool(self._inward)
            if self._is_paused and len(self._inward) < _WAITING // 2:
                self._hub.call(partial(self._guarded, self._read_on))
            if self._is_filing:
                self._hub.file_soon(self)

    def _handle(self, found: Frame | None) -> None:
        if found is None:
            self.requests.end()
            self._filed.set()
        elif "re" in found[0]:
            self.requests.settle(found[0]["re"], found)
        else:
            self._hear(*found)

    def _read_on(self) -> None:
        self._is_paused = False
        self._heard = time.monotonic()
        self._watch()

    # --- the end

    def _end(self, why: Callable[[], str]) -> None:
        """End the connection for the reason that `why` returns."""
        if self._has_ended:
            return
        self._has_ended = True
        ends = self._ends
        for fd in {ends.read_fd, ends.write_fd, ends.stderr_fd} - {None}:
            assert fd is not None
            self._hub.forget(fd)
        self._hub.after(_FILING_S, self.requests.end)
        if ends.process is None:
            self._finish(why)
        else:
            threading.Thread(target=self._finish, args=(why,), name="paceline-link-end", daemon=True).start()

    def _finish(self, why: Callable[[], str]) -> None:
        try:
            # Record the reason first: threads that wake up below read `lost`.
            text = why()
            if not self.is_closing:
                self.lost = f"{self._name}: {text}"
            self.out.drop()
            self._end_program(2.0 if self.is_closing else 0.2)
        finally:
            self._close_fds()
            # None comes after all frames that arrived, so a filer handles these frames before it.
            self._put_inward(None)
            self._over.set()
        self._on_lost()

    def _why_ended(self) -> str:
        ends = self._ends
        code = ends.exit_code(1.0)
        ends.hear_rest(0.1)
        lines = [line for line in ends.stderr().splitlines() if line.strip()]
        torn = " in the middle of a frame" if self._frames.is_torn else ""
        told = f": {lines[-1]}" if lines else "."
        return f"its agent is gone{torn}{f' (exit code {code})' if code else ''}{told}"

    def _end_program(self, wait_s: float) -> None:
        """End the local program unless it exits within `wait_s`. The agent then detects the end of the link."""
        process = self._ends.process
        if process is None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._ends.read_fd)) as mine:
                mine.shutdown(socket.SHUT_RDWR)
            return
        for number, patience_s in ((None, wait_s), (signal.SIGTERM, 1.0), (signal.SIGKILL, 2.0)):
            if process.returncode is None and number is not None:
                processes.send(process.pid, number)
            if self._ends.exit_code(patience_s) is not None:
                return

    def _close_fds(self) -> None:
        ends = self._ends
        for fd in {ends.read_fd, ends.write_fd, ends.stderr_fd} - {None}:
            assert fd is not None
            with contextlib.suppress(OSError):
                os.close(fd)
