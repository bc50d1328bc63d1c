"""The server to which the processes beside the ranks connect.

    accept, a thread for each address    -> a thread for each connection
    that thread: proof of the key, hello -> `joined`; then what the rank says, in its order -> `events`

The driver's thread alone takes from the two queues. `events` is bounded, so ranks that print faster than they are read wait.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from paceline.compat.horovod.runner import wire
from paceline.system import listening

_TICK_S = 0.1
#: Pieces that wait to be printed, at most; then the ranks wait.
_PIECES = 1000


class RankListener:
    """Listens while the block runs. hosts: the addresses of this machine to listen at, "" for all.

    addresses: where, with the ports.
    joined: (connection, hello) of each rank; events: (rank, what it has said), None at the end of its connection.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.key = secrets.token_bytes(32)
        # Without a bound: each rank is in it once.
        self.joined: queue.Queue[tuple[Connection, dict[str, Any]]] = queue.Queue()
        self.events: queue.Queue[tuple[int, bytes | None]] = queue.Queue(_PIECES)
        self._closed = False
        # 1024, for the ranks of a large job connect at the same moment.
        self._listeners = [socket.create_server((host, 0), backlog=1024) for host in hosts]
        self.addresses = [
            (host, int(listener.getsockname()[1])) for host, listener in zip(hosts, self._listeners, strict=True)
        ]

    def __enter__(self) -> RankListener:
        for listener in self._listeners:
            # Daemons: one that waits for a stranger's answer must not keep this process from its end.
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # First: threads that wait for room in `events` give up when they see it.
        self._closed = True
        for listener in self._listeners:
            listening.close(listener)

    def _accept(self, listener: socket.socket) -> None:
        listening.accept_each(listener, self._hear, lambda: self._closed)

    def _hear(self, connected: socket.socket) -> None:
        connection = wire.accept(connected, self.key)
        if connection is None:
            return
        try:
            hello = wire.receive(connection)
            rank = int(hello["rank"])
        except (EOFError, ValueError, KeyError):
            connection.close()
            return
        self.joined.put((connection, hello))
        with contextlib.suppress(OSError, EOFError):
            # One thread reads a connection, so what a rank says stays in its order.
            while not self._closed:
                self._pass_on(rank, connection.recv_bytes())
        # Also after an error of the connection: the driver learns by this alone that the rank's host is gone.
        self._pass_on(rank, None)

    def _pass_on(self, rank: int, data: bytes | None) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Full):
                # In short waits, so that the thread sees `_closed` though nobody takes from the queue any more.
                self.events.put((rank, data), timeout=_TICK_S)
                return
