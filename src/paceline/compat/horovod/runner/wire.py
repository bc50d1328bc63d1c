"""The connection between `horovodrun` and the parent process of each rank (`runner.rank`).

First both sides prove that they know the key (`system.handshake`). Then `horovodrun` (driver) and the rank send:

    rank      RankHello
    driver    RankStart, then the content of each file
    rank      o<bytes>  e<bytes>                   pieces of standard output and error, any number
    rank      f<size, 8 bytes><name>  k<bytes>     a file of its folder, in pieces: `result`, or a commit for the next attempt
    rank      E<RankEndMessage>                    the last message
    driver    {"hosts": true}                      the hosts have changed: end the program at its next commit
    driver    {"end": true} or {"interrupt": true} at any time; a closed connection means "end"
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, TypedDict, cast

from paceline.system import listening
from paceline.system.handshake import authenticate

if TYPE_CHECKING:
    from paceline.supervisor.diagnosis.diagnose import ErrorFile

#: Environment variable with the addresses at which `horovodrun` listens, and with the key. The processes of the ranks read it.
VARIABLE = "HOROVODRUN_CONNECT"
#: Maximum number of seconds to try an address: if a firewall drops packets, a connection would fail only after minutes.
_HANDSHAKE_S = 20.0
_OF_HOST = frozenset(
    ("HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "TMPDIR", "USER", "DISPLAY", "XDG_RUNTIME_DIR")
)
#: Names of files in a rank's folder: the function that the rank calls, and the result of the function.
CALL, RESULT = "call", "result"
#: Read this many bytes at once. A Linux pipe holds as many, so one read empties it.
PIECE_BYTES = 1 << 16


class RankHello(TypedDict):
    """The first message from a rank's process to `horovodrun`."""

    rank: int
    host: str
    pid: int
    port: int
    cores: list[int]


class RankStart(TypedDict):
    """`horovodrun`'s first message to a rank's process, followed by the files.

    `files` has the names of these files: a function call, or saved states. `scratch` has the folders that the rank's
    process removes if `horovodrun` has died.
    """

    argv: list[str]
    environment: dict[str, str]
    directory: str
    files: list[str]
    scratch: list[str]
    is_elastic: bool


class RankEndMessage(TypedDict):
    """A rank's last message to `horovodrun`: how the program ended."""

    exit_code: int
    error: ErrorFile | None
    time: float


_TICK_S = 0.1
#: Maximum number of pieces of output in the queue. If the queue is full, the ranks have to wait.
_PIECES = 1000


def connect(addresses: list[tuple[str, int]], key: bytes) -> Connection:
    """Return a connection to the first of these addresses whose server knows the key."""
    errors = []
    for address in addresses:
        try:
            return authenticate(_prepared(socket.create_connection(address, timeout=_HANDSHAKE_S)), key, is_client=True)
        except OSError as error:
            errors.append(f"{address[0]}:{address[1]}: {error or type(error).__name__}")
    raise ConnectionError(f"horovodrun can't be reached at {'; '.join(errors)}")


def accept(connected: socket.socket, key: bytes) -> Connection | None:
    """Return the connection if the client knows the key, otherwise None."""
    try:
        return authenticate(_prepared(connected), key, is_client=False)
    except ConnectionError:
        return None


def send(connection: Connection, content: Mapping[str, object]) -> None:
    connection.send_bytes(json.dumps(content).encode())


def receive(connection: Connection) -> dict[str, object]:
    """Return the next JSON message of the connection."""
    try:
        content = json.loads(connection.recv_bytes())
    except OSError as error:
        raise EOFError(str(error)) from error
    assert isinstance(content, dict)
    return content


def hang_up(connection: Connection) -> None:
    """Close the connection, even while a thread reads from it."""
    # Shut the socket down, which wakes a thread that reads from it. Closing the descriptor would not wake the thread.
    with contextlib.suppress(OSError):
        # A Connection has no method for the shutdown, but a socket has one. Give the socket a duplicate of the descriptor,
        # because the `with` block closes the socket's descriptor.
        with socket.socket(fileno=os.dup(connection.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)
        connection.close()


def is_of_host(variable: str) -> bool:
    """Return whether an environment variable is specific to this host."""
    return variable in _OF_HOST or variable.startswith(("SSH_", "BASH_FUNC_"))


def _prepared(connected: socket.socket) -> socket.socket:
    # Remove the time limit: with it the descriptor is non-blocking, and Connection can't read from such a descriptor.
    connected.settimeout(None)
    # Send small messages at once. By default, TCP delays them until the previous message is acknowledged (Nagle's algorithm).
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.keep_alive(connected, idle_s=20, interval_s=10)
    return connected


class RankListener:
    """A server for the ranks' processes at these addresses.

        accept, a thread for each address    -> a thread for each connection
        that thread: handshake, hello        -> `joined`; then the rank's messages in order -> `events`

    Only one thread of `horovodrun` reads the two queues. `events` has a maximum size, so a rank that prints faster than
    this thread reads must wait.

    Attributes:
        addresses: (host, port) pairs at which the server listens.
        joined: Queue of (connection, hello), one from each rank.
        events: Queue of (rank, message). The message is None when the rank's connection ends.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.key = secrets.token_bytes(32)
        self.joined: queue.Queue[tuple[Connection, RankHello]] = queue.Queue()
        self.events: queue.Queue[tuple[int, bytes | None]] = queue.Queue(_PIECES)
        self._closed = False
        # Let 1024 connections wait, because all ranks of a large job connect at the same time.
        self._listeners = [socket.create_server((host, 0), backlog=1024) for host in hosts]
        self.addresses = [
            (host, int(listener.getsockname()[1])) for host, listener in zip(hosts, self._listeners, strict=True)
        ]

    def __enter__(self) -> RankListener:
        for listener in self._listeners:
            # Use daemon threads: a thread that waits for a foreign process must not keep this process from exiting.
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Set this before the listeners close: threads that wait for space in `events` then give up.
        self._closed = True
        for listener in self._listeners:
            listening.close(listener)

    def _accept(self, listener: socket.socket) -> None:
        listening.accept_each(listener, self._hear, lambda: self._closed)

    def _hear(self, connected: socket.socket) -> None:
        connection = accept(connected, self.key)
        if connection is None:
            return
        try:
            hello = cast("RankHello", receive(connection))
            rank = int(hello["rank"])
        except (EOFError, ValueError, KeyError):
            connection.close()
            return
        self.joined.put((connection, hello))
        with contextlib.suppress(OSError, EOFError):
            while not self._closed:
                self._pass_on(rank, connection.recv_bytes())
        # Send None when the connection ends, even after an error. This tells the driver that the rank or its host is gone.
        self._pass_on(rank, None)

    def _pass_on(self, rank: int, data: bytes | None) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Full):
                # Wait in short steps, so that the thread detects a call of `close` even if the queue stays full.
                self.events.put((rank, data), timeout=_TICK_S)
                return
