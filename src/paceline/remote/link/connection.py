"""The connection to an agent, over which requests, answers, events and pings travel as frames.

    any thread   ask          -> SendQueue, a separate thread      -> the node
    reader       poll, take   <-                                   <- the node
                   an immediate answer                   -> the thread that waits for it
                   events, answers in order              -> _inward -> filer: stores files, calls `hear`

The reader and the filer are threads. The reader waits for the filer only if the queue `_inward` is full, so answers and
pings overtake files. An answer "in order" must not overtake earlier files, so the filer delivers it. When the
connection ends, the reader records the reason, ends the local program, and puts None into `_inward`, which ends the
filer. After that, all requests without an answer fail.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.remote.agent.send_queue import SendQueue
from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.messages import LinkError, Pending, Requests
from paceline.remote.wire import Frame, Frames, Header, WireError, ping_s
from paceline.system import processes

#: Maximum number of received frames that wait for the filer thread. They have at most 16 MiB together.
_WAITING = 64


class AgentConnection:
    """A connection to an agent, whose threads read and write frames after `start`.

    hear: A callback that gets each received frame that is not an answer, in order. The callback may take long.
    """

    def __init__(self, ends: Ends, name: str, silence_s: float, hear: Callable[[Header, bytes], None]) -> None:
        self.lost: str | None = None
        # The times of the last received bytes, and of the last timeout of a request. Comparing these two times needs no lock.
        self._heard = self._waited_in_vain = time.monotonic()
        self.out = SendQueue(ends.write_fd, ping_s(silence_s))
        self.requests = Requests()
        self._ends, self._name, self._silence_s, self._hear = ends, name, silence_s, hear
        self._frames = Frames()
        self._inward: queue.Queue[Frame | None] = queue.Queue(_WAITING)
        #: Whether this side has closed the connection. If so, the end of the connection does not count as a loss of the node.
        self.is_closing = False
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"paceline-link-{name}", daemon=True)
        self._filer = threading.Thread(target=self._file, name=f"paceline-files-{name}", daemon=True)

    def start(self, first: bytes) -> None:
        """Start the threads. `first` are bytes of frames that `bootstrap` has already read."""
        self._first = first
        self.out.start()
        self._filer.start()
        self._reader.start()

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
            self._end_program(0.5)
            self._over.wait(2.0)
        self._filer.join(5.0)

    # --- reading from the link

    def _read(self) -> None:
        try:
            why = self._read_all()
        except WireError as error:
            why = f"what came is not an agent's: {error}"
        except OSError as error:
            why = f"the link broke: {error.strerror or error}"
        try:
            # Store the reason in `lost` before waking any threads, because these threads read `lost` at once.
            if not self.is_closing:
                self.lost = f"{self._name}: {why}"
            self.out.drop()
            self._end_program(2.0 if self.is_closing else 0.2)
            # None makes the filer thread end after it has handled all frames that have arrived.
            self._inward.put(None)
            # Call `_end_requests` in another thread, because it waits for the filer thread, which may still deliver answers.
            threading.Thread(target=self._end_requests, daemon=True).start()
        finally:
            # Join the sending thread before closing the descriptors: the kernel reuses their numbers for other files.
            self.out.join(5.0)
            self._close_fds()
            self._over.set()

    def _end_requests(self) -> None:
        self._filer.join(5.0)
        self.requests.end()

    def _read_all(self) -> str:
        self._take(self._first)
        self._heard = time.monotonic()
        while True:
            if self._ends.wait(min(1.0, self._silence_s / 4)):
                data = os.read(self._ends.read_fd, 1 << 18)
                if not data:
                    return self._why_ended()
                self._take(data)
                # Read the clock only now, because `_take` may wait until earlier files are stored.
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > self._silence_s and not self._ends.wait(0):
                return f"nothing heard for {self._silence_s:g} s."

    def _take(self, data: bytes) -> None:
        # Any received byte proves that the node lives. So a ping has no content, and needs no handling.
        for header, content in self._frames.feed(data):
            if header.get("op") == "ping":
                continue
            pending = self.requests.find(header["re"]) if "re" in header else None
            if pending is None or pending.in_order:
                self._inward.put((header, content))
            else:
                self.requests.settle(header["re"], (header, content))

    def _file(self) -> None:
        # `hear` must not raise: an exception would end this thread, and the queue would fill up and block the reader.
        while (found := self._inward.get()) is not None:
            header, content = found
            if "re" in header:
                self.requests.settle(header["re"], (header, content))
            else:
                self._hear(header, content)

    def _why_ended(self) -> str:
        ends = self._ends
        code = ends.exit_code(1.0)
        ends.hear_rest(0.1)
        lines = [line for line in ends.stderr().splitlines() if line.strip()]
        torn = " in the middle of a frame" if self._frames.is_torn else ""
        told = f": {lines[-1]}" if lines else "."
        return f"its agent is gone{torn}{f' (exit code {code})' if code else ''}{told}"

    # --- the end of the connection

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
        ends = self._ends
        for fd in {ends.read_fd, ends.write_fd, ends.stderr_fd} - {None}:
            assert fd is not None
            with contextlib.suppress(OSError):
                os.close(fd)
