"""The connection to an agent, over which requests, answers, events and pings travel as frames.

The hub's thread (`paceline.remote.link.hub`) reads and writes. The filer's thread stores files and calls `hear`. The hub
stops reading only while `_inward` is full, so answers and pings overtake files. The filer delivers an answer "in order"
after all earlier files. When the connection ends, `_finish` records the reason and puts None into `_inward`. The filer
gets this None after all earlier frames, and then lets all requests without an answer fail.

    any thread   ask          -> Outbox    -> hub     -> the node
    hub          on_ready     <-                      <- the node
                   an immediate answer: settles its request
                   events, answers in order  -> _inward -> filer
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

#: Most received frames that wait for the thread that stores files; frames of a connection that it handles in a row.
_WAITING, _AT_A_TIME = 64, 32
#: Bytes to join for one write; writes to one connection before the hub's thread serves the other connections.
_WRITE_BYTES, _WRITES = 1 << 16, 16
#: If the thread that stores files hangs, requests fail this many seconds after the end of their connection.
_FILING_S = 5.0


class AgentConnection:
    """A connection to an agent; after `start`, the thread of `LinkHub` serves it.

    hear: A callback that gets each received message that is not an answer, in order. The callback may take long.
    on_lost: A callback that is called when the node counts as lost.
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
        # When bytes last arrived, when a request last timed out, when bytes were last sent. Plain floats need no lock.
        self._heard = self._waited_in_vain = self._sent = time.monotonic()
        self.out = Outbox(self._write_soon)
        self.requests = Requests()
        self._ends, self._name, self._silence_s, self._hear = ends, name, silence_s, hear
        self._on_lost = on_lost
        self._frames = Frames()
        self._inward: collections.deque[Frame | None] = collections.deque()
        #: Guards two flags: whether the thread that stores files has to serve this connection, and whether reads pause.
        self._lock = threading.Lock()
        self._is_filing = self._is_paused = False
        self._hub, self._unsent = hub(), memoryview(b"")
        self._wants_write = self._has_ended = False
        #: Whether the hub's list of connections to write has this connection. True before `start`, so nothing is written.
        self.is_queued = True
        #: Whether this side has closed the connection. If so, the end of the connection does not count as a loss of the node.
        self.is_closing = False
        #: Seconds that the local program gets to exit by itself after this side has closed the connection.
        self._patience_s = 2.0
        self._over, self._filed = threading.Event(), threading.Event()

    def start(self, first: bytes) -> None:
        """Start to serve the connection. `first`: bytes that `bootstrap` has read already."""
        for fd in {self._ends.read_fd, self._ends.write_fd}:
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
        """Send a request without waiting. Return the pending request, for `answer`."""
        pending = self.requests.new()
        self.out.put({"op": op, "id": pending.number, **values}, data)
        return pending

    def answer(self, pending: Pending, op: str, timeout_s: float) -> Frame:
        """Return the answer to a request of `send`; errors are as for `ask`."""
        try:
            return self.wait_for(pending, op, timeout_s)
        finally:
            if not pending.is_done:
                self._waited_in_vain = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether a request timed out and no byte has arrived since."""
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
        """Close the descriptors and the local program of a connection that was never started."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            if self._ends.write_fd != self._ends.read_fd:
                os.close(self._ends.write_fd)
                self._ends.write_fd = self._ends.read_fd
        self._end_program(0.1)
        self._close_fds()

    def close(self, wait_s: float) -> None:
        """Close the connection. Kill the local program unless the agent ends within `wait_s`."""
        self.is_closing = True
        self.out.finish()
        if not self._over.wait(wait_s):
            self._patience_s = 0.5
            self._hub.call(partial(self._end, lambda: "closed"))
            self._over.wait(4.0)
        self._filed.wait(_FILING_S)

    # --- reading and writing, in the hub's thread

    def _begin(self, first: bytes) -> None:
        self.is_queued = False
        self._heard = self._sent = time.monotonic()
        self._watch()
        if self._ends.stderr_fd is not None:
            self._hub.watch(self, self._ends.stderr_fd, select.EPOLLIN)
        self._hub.after(min(1.0, self._silence_s / 4), partial(self._guarded, self._tick))
        self._take(first)
        self._write_soon()

    def _watch(self) -> None:
        """Register the events (read, write) for which this connection waits."""
        ends = self._ends
        reads = 0 if self._is_paused else select.EPOLLIN
        writes = select.EPOLLOUT if self._wants_write else 0
        if ends.read_fd == ends.write_fd:
            self._hub.watch(self, ends.read_fd, reads | writes)
            return
        self._hub.watch(self, ends.read_fd, reads)
        # Watch the write end only if needed: epoll reports a closed pipe again and again, even without any events.
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
        if events & select.EPOLLOUT or fd != self._ends.read_fd:
            self._write()
        if fd == self._ends.read_fd and events & ~select.EPOLLOUT:
            self._read()

    def on_output(self) -> None:
        self._guarded(self._write)

    def _write(self) -> None:
        wants = False
        try:
            for _ in range(_WRITES):
                if not self._unsent and not self._fill():
                    break
                self._unsent = self._unsent[os.write(self._ends.write_fd, self._unsent) :]
                self._sent = time.monotonic()
            else:
                self._write_soon()
        except BlockingIOError:
            wants = True
        except OSError:
            self.out.drop()  # `_read` finds out why the connection has ended
        if wants != self._wants_write:
            self._wants_write = wants
            self._watch()

    def _fill(self) -> bool:
        parts, size = [], 0
        while size < _WRITE_BYTES and (data := self.out.take()) is not None:
            parts.append(data)
            size += len(data)
        self._unsent = memoryview(b"".join(parts))
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
        # Most messages of a node are pings, which need no parsing.
        if data != PING or self._frames.is_torn:
            self._take(data)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call `work`, unless the connection has ended. An exception of `work` ends the connection."""
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
        # Any received byte proves that the node lives. So a ping has no content, and needs no handling.
        for header, content in self._frames.feed(data):
            if header.get("op") == "ping":
                continue
            pending = self.requests.find(header["re"]) if "re" in header else None
            if pending is None or pending.in_order:
                self._put_inward((header, content))
            else:
                self.requests.settle(header["re"], (header, content))
        with self._lock:
            # Check and pause under one lock. If `file_some` emptied the queue in between, the pause would never end.
            pauses = len(self._inward) >= _WAITING
            self._is_paused = self._is_paused or pauses
        if pauses:
            self._watch()

    def _read_on(self) -> None:
        self._is_paused = False
        self._heard = time.monotonic()
        self._watch()

    def _tick(self) -> None:
        """Send a ping if nothing was sent lately. End a silent connection."""
        now, pause_s = time.monotonic(), ping_s(self._silence_s)
        if self._is_paused:
            # While reading is paused, the node's silence means nothing.
            self._heard = now
        if now - self._heard > self._silence_s:
            # A busy machine may delay this thread. Read arrived bytes before the node counts as silent.
            self._read()
        if now - self._heard > self._silence_s:
            self._end(partial(str, f"nothing heard for {self._silence_s:g} s."))
            return
        if now - self._sent >= pause_s and not self._wants_write:
            self.out.put({"op": "ping"})
        due_s = min(self._sent + pause_s, self._heard + self._silence_s) - now
        self._hub.after(max(due_s, pause_s / 4), partial(self._guarded, self._tick))

    def _write_soon(self) -> None:
        self._hub.write_soon(self)

    # --- handling of received frames, in the filer's thread

    def _put_inward(self, found: Frame | None) -> None:
        with self._lock:
            self._inward.append(found)
            if self._is_filing:
                return
            self._is_filing = True
        self._hub.file_soon(self)

    def file_some(self) -> None:
        """Handle some received messages. If others wait, request a further call."""
        try:
            for _ in range(min(_AT_A_TIME, len(self._inward))):
                self._handle(self._inward.popleft())
        except Exception as error:  # end only this connection, because other connections need this thread
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

    # --- the end of the connection

    def _end(self, why: Callable[[], str]) -> None:
        """End the connection, in the hub's thread. `why` returns the reason, and may take a second."""
        if self._has_ended:
            return
        self._has_ended = True
        for fd in self._ends.descriptors():
            self._hub.forget(fd)
        # The end of the local program may take seconds, so wait for it in another thread.
        if self._ends.process is None or not _in_thread(partial(self._finish, why)):
            self._finish(why)

    def _finish(self, why: Callable[[], str]) -> None:
        try:
            text = why()
        except Exception as error:
            text = f"the link failed: {error!r}"
        # Store the reason in `lost` before waking any threads, because these threads read `lost` at once.
        is_lost = not self.is_closing
        if is_lost:
            self.lost = f"{self._name}: {text}"
        self.out.drop()
        self._put_inward(None)
        self._hub.call(partial(self._hub.after, _FILING_S, self.requests.end))
        try:
            if is_lost:
                self._on_lost()
            self._end_program(0.2 if is_lost else self._patience_s)
        finally:
            self._close_fds()
            self._over.set()

    def _why_ended(self) -> str:
        ends = self._ends
        code = ends.exit_code(1.0)
        ends.hear_rest(0.1)
        lines = [line for line in ends.stderr().splitlines() if line.strip()]
        torn = " in the middle of a frame" if self._frames.is_torn else ""
        told = f": {lines[-1]}" if lines else "."
        return f"its agent is gone{torn}{f' (exit code {code})' if code else ''}{told}"

    def _end_program(self, wait_s: float) -> None:
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
        for fd in self._ends.descriptors():
            with contextlib.suppress(OSError):
                os.close(fd)


def _in_thread(work: Callable[[], None]) -> bool:
    try:
        threading.Thread(target=work, name="paceline-link-end", daemon=True).start()
    except RuntimeError:  # the limit of threads is reached
        return False
    return True
