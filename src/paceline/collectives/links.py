"""Ordered messages between two processes over TCP. Sending never blocks.

These connections replace MPI's messages. The connecting rank sends its rank number, and proves that it knows the secret
key that the ranks share. The key is never sent.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable

from paceline.system.frames import FrameBuffer, frame
from paceline.system.handshake import is_tag, tag
from paceline.system.listening import keep_alive

_HELLO = struct.Struct("!I32s")
_READ_BYTES = 1 << 16
#: Close a new connection after this many seconds if it has not sent its rank, because it may come from a foreign process.
_HELLO_S = 5.0


class PeerLink:
    """A TCP connection to another rank.

    Only one thread receives. Any thread may send: threads other than the engine's thread send only reports of failures.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(self._socket, probes=3)
        # Protects `_out`. A header must stay together with its content, and no thread may add bytes while the kernel reads them:
        # Python raises BufferError if a bytearray is resized while it is in use.
        self._sending = threading.Lock()
        self._out = bytearray()
        self._in = FrameBuffer()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Queue a message, and send as much as the kernel accepts without blocking."""
        with self._sending:
            self._out += frame(data)
            self._flush()

    def flush(self) -> bool:
        """Send queued bytes until the kernel accepts no more. Return whether all are sent."""
        with self._sending:
            return self._flush()

    def _flush(self) -> bool:
        while self._out:
            try:
                del self._out[: self._socket.send(self._out)]
            except BlockingIOError:
                return False
        return True

    def receive(self) -> bytes | None:
        """Return the next message, or None if none has arrived."""
        if self._out:
            self.flush()
        message = self._in.take()
        while message is None:
            try:
                read = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            if not read:
                raise EOFError("the connection was closed by the other side")
            self._in.feed(read)
            message = self._in.take()
        return message

    def has_message(self) -> bool:
        """Return whether a whole message is buffered, which `poll` does not report."""
        return self._in.has_frame

    def has_unsent(self) -> bool:
        return bool(self._out)

    def close(self) -> None:
        self._socket.close()


def listen(address: str) -> socket.socket:
    """Open a server socket at one of this machine's addresses, on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def accept(server: socket.socket, key: bytes, ranks: Iterable[int], timeout_s: float) -> dict[int, PeerLink]:
    """Accept a connection from each of these ranks. Return rank -> connection."""
    links: dict[int, PeerLink] = {}
    missing = set(ranks)
    end_s = time.monotonic() + timeout_s
    while missing:
        server.settimeout(max(0.0, end_s - time.monotonic()) or 0.001)
        try:
            connected, _ = server.accept()
        except TimeoutError:
            for link in links.values():
                link.close()
            names = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"no connection from rank {names} within {timeout_s:g} s") from None
        rank = _greeted(connected, key)
        if rank in missing:
            missing.discard(rank)
            links[rank] = PeerLink(connected)
        else:
            connected.close()
    return links


def connect(address: str, port: int, key: bytes, rank: int, timeout_s: float) -> PeerLink:
    """Connect to another rank's server, as the rank with number `rank`."""
    connected = socket.create_connection((address, port), timeout=timeout_s)
    try:
        connected.sendall(_HELLO.pack(rank, tag(key, "rank", str(rank).encode())))
        return PeerLink(connected)
    except BaseException:
        connected.close()
        raise


def wait(links: Iterable[PeerLink], timeout_s: float) -> None:
    """Wait until a connection to a rank is readable or `timeout_s` has passed."""
    poll = select.poll()
    for link in links:
        poll.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.has_unsent() else 0))
    poll.poll(max(0.0, timeout_s) * 1000)


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`."""
    last: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                # Connecting a datagram socket sends nothing. It only makes the kernel choose a route to the address.
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                last = error
    raise last or OSError(f"no address is known for {host!r}")


def _greeted(connected: socket.socket, key: bytes) -> int:
    """Return the connecting rank, or -1 if it does not prove that it has the key."""
    end_s = time.monotonic() + _HELLO_S
    hello = b""
    with contextlib.suppress(OSError):
        while len(hello) < _HELLO.size:
            connected.settimeout(max(0.001, end_s - time.monotonic()))
            read = connected.recv(_HELLO.size - len(hello))
            if not read:
                return -1
            hello += read
        rank, proof = _HELLO.unpack(hello)
        if is_tag(proof, key, "rank", str(rank).encode()):
            return int(rank)
    return -1
