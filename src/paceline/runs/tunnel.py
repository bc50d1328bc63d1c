"""A tunnel from a port of this machine to a port on a worker's node, through `paceline exec`.

    browser ── 127.0.0.1:LOCAL ── Tunnel ═══ one exec command ═══ relay.py ── 127.0.0.1:PORT ── the worker's server

The tunnel uses only these two loopback addresses, so no machine needs a port that other machines can reach.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time

from paceline.errors import RunStateError, UserError
from paceline.remote.agent.relay import Connections
from paceline.runs.execute import Beside
from paceline.runs.folder import RunFolder
from paceline.system import listening

#: Seconds after the last data in which the tunnel polls for data frequently; and the pause in seconds between later polls.
_BUSY_S, _IDLE_PAUSE_S = 2.0, 0.1
#: Number of queued messages to the node from which on the tunnel stops reading from its connections.
_MOST_WAITING = 64


def listen(local_port: int) -> socket.socket:
    """Return a socket that listens on the loopback address of this machine.

    Raises:
        UserError: The port is taken.
    """
    try:
        return listening.listen_at("127.0.0.1", local_port, backlog=64)
    except OSError as error:
        raise UserError(
            f"port {local_port} of this machine can't be taken: {error.strerror}. Name another one."
        ) from error


class Tunnel:
    """A port of this machine whose connections lead to a worker's node.

    Attributes:
        local_port: The port of 127.0.0.1 at which the tunnel listens.

    Args:
        port: Port of 127.0.0.1 on the worker's node.
        rank: The worker's rank.
        local_port: Port to listen at; 0 for a free one.

    Raises:
        UserError: The local port is taken, or the run has no such rank.
        RunStateError: The run is not alive, or belongs to another user.
    """

    def __init__(self, folder: RunFolder, port: int, *, rank: int = 0, local_port: int = 0) -> None:
        self._folder, self._port = folder, port
        self._listener = listen(local_port)
        self.local_port: int = self._listener.getsockname()[1]
        self._is_closed = False
        self._numbers = itertools.count(1)
        try:
            self._beside = Beside(folder, ["paceline forward"], rank=rank, relay=port)
        except BaseException:
            self._listener.close()
            raise
        #: Data for `step`. Only `step` sends to the channel, because two threads could give two messages the same number.
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        #: Data that arrived while the thread waited for data. The next call of `step` sends it.
        self._next = b""
        self._readers: set[threading.Thread] = set()
        self._connections = Connections(self._send)
        self._busy_until = 0.0
        threading.Thread(
            target=listening.accept_each, args=(self._listener, self._greet, lambda: self._is_closed), daemon=True
        ).start()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Forward data to and from the node. If there is none, wait a moment.

        Raises:
            RunStateError: The run or its relay has ended.
        """
        data, self._next = bytearray(self._next), b""
        while not self._waiting.empty():
            data += self._waiting.get()
        if data:
            self._beside.write(bytes(data))
        pause_s = 0.01 if time.monotonic() < self._busy_until else _IDLE_PAUSE_S
        found = self._beside.heard(pause_s, self._wait_for_data)
        for name, output in found:
            if name == "out":
                self._busy_until = time.monotonic() + _BUSY_S
                self._connections.feed(output)
        if self._beside.exit_code is not None:
            raise RunStateError(f"run {self._folder.run_id}: the tunnel to port {self._port} was closed on the node.")

    def _wait_for_data(self, seconds: float) -> None:
        """Wait until a connection has data for the node, for at most `seconds`."""
        with contextlib.suppress(queue.Empty):
            self._next = self._waiting.get(timeout=seconds)

    def serve(self) -> None:
        """Pass on data until the run ends, which raises an error.

        Raises:
            RunStateError: The run has ended.
        """
        while True:
            self.step()

    def close(self) -> None:
        """Close all connections, and end the relay on the node. Idempotent."""
        self._is_closed = True
        listening.close(self._listener)
        self._connections.close()
        self._beside.close()

    def _send(self, data: bytes) -> None:
        self._busy_until = time.monotonic() + _BUSY_S
        # Wait while the queue is full, except in the thread of `step`, which empties the queue.
        while (
            self._waiting.qsize() > _MOST_WAITING
            and threading.current_thread() in self._readers
            and not self._is_closed
        ):
            time.sleep(_IDLE_PAUSE_S)
        self._waiting.put(data)

    def _greet(self, connected: socket.socket) -> None:
        self._readers.add(threading.current_thread())
        try:
            self._connections.add(next(self._numbers), connected)
        finally:
            self._readers.discard(threading.current_thread())
