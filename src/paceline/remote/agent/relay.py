"""Connect a tunnel to a port of this node: `python -I -S .../relay.py PORT`, started by `execute.py`.

Standard input and output carry frames (`paceline.system.frames`): connection number (4 bytes), kind (one letter), data.

    o    the client has accepted a connection; this program opens one to 127.0.0.1:PORT
    d    data
    e    the sender's side of the connection has ended
    x    the connection is closed
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

if __name__ == "__main__":
    # Python's option -I isolates this program from the script's environment, so add the library to sys.path here.
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")))

from paceline.system.frames import FrameBuffer, frame

OPEN, DATA, END, CLOSED = b"o", b"d", b"e", b"x"
_CHUNK = 1 << 16
#: Seconds within which a receiver must accept data. Otherwise a stuck receiver would block all connections of the tunnel.
_STUCK_S = 30.0


class Connections:
    """The connections of one end of a tunnel.

    Args:
        send: Sends bytes to the other end. Several threads call it, one at a time.
        connect: Opens a connection when the other end requests it; None at the end that accepts connections.
    """

    def __init__(self, send: Callable[[bytes], None], connect: Callable[[], socket.socket] | None = None) -> None:
        self._send, self._connect = send, connect
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}
        #: Numbers of connections of which one side has announced the end of its data.
        self._half: set[int] = set()
        self._half_lock = threading.Lock()
        self._buffer = FrameBuffer()

    def add(self, number: int, connected: socket.socket) -> None:
        """Add a connection, and send its data to the other end until it ends."""
        connected.settimeout(_STUCK_S)
        self._open[number] = connected
        self._tell(number, OPEN)
        self._pass_on(number, connected)

    def feed(self, data: bytes) -> None:
        """Parse bytes from the other end, and handle each frame that is now complete."""
        self._buffer.feed(data)
        while (content := self._buffer.take()) is not None:
            self._take(int.from_bytes(content[:4], "big"), content[4:5], content[5:])

    def close(self) -> None:
        """Close all connections."""
        for number in list(self._open):
            self._drop(number)

    def _take(self, number: int, kind: bytes, data: bytes) -> None:
        try:
            if kind == OPEN and self._connect is not None:
                self._open[number] = connected = self._connect()
                connected.settimeout(_STUCK_S)
                threading.Thread(target=self._pass_on, args=(number, connected), daemon=True).start()
            elif kind == DATA:
                self._open[number].sendall(data)
            elif kind == END:
                self._open[number].shutdown(socket.SHUT_WR)
                self._end_half(number)
            elif kind == CLOSED:
                self._drop(number)
        except KeyError:
            return  # this process has closed the connection meanwhile
        except OSError:
            self._drop(number)
            self._tell(number, CLOSED)

    def _pass_on(self, number: int, connected: socket.socket) -> None:
        for data in _received(connected):
            self._tell(number, DATA, data)
        if number in self._open:
            self._tell(number, END)
            self._end_half(number)

    def _tell(self, number: int, kind: bytes, data: bytes = b"") -> None:
        with self._lock:
            self._send(frame(number.to_bytes(4, "big") + kind + data))

    def _end_half(self, number: int) -> None:
        with self._half_lock:
            is_over = number in self._half
            self._half.add(number)
        if is_over:
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._half.discard(number)
        if (found := self._open.pop(number, None)) is not None:
            try:
                # Call `shutdown` first: `close` alone would not wake the thread that reads from the socket.
                found.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            found.close()


def _received(connected: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = connected.recv(_CHUNK)
        except TimeoutError:
            continue  # try again: the timeout should limit only sending
        except OSError:
            return
        if not data:
            return
        yield data


def main(port: int) -> None:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]

    connections = Connections(write, lambda: socket.create_connection(("127.0.0.1", port), timeout=_STUCK_S))
    while data := os.read(0, _CHUNK):
        connections.feed(data)
    connections.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
