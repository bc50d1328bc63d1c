"""Listen on sockets, with one thread for each connection."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable

_AGAIN_S = 0.1


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket.

    port: The port, or 0 for any free port.
    backlog: Number of connections that may wait to be accepted.

    Raises:
        OSError: The port is taken or forbidden, or `host` is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        # Without this option, a restarted server could not bind its port for a minute: closed connections still block the port.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made


def keep_alive(sock: socket.socket, *, idle_s: int = 10, interval_s: int = 5, probes: int = 4) -> None:
    """Close a silent connection after `idle_s + probes * interval_s` if the peer is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", interval_s), ("TCP_KEEPCNT", probes)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limit_silence(sock: socket.socket, seconds: int) -> None:
    """Let `recv` fail after so many seconds without data; 0 for no limit.

    Unlike `settimeout`, this keeps the descriptor blocking, which `multiprocessing.connection.Connection` needs.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def accept_each(
    listener: socket.socket, greet: Callable[[socket.socket], None], is_closed: Callable[[], bool] = lambda: False
) -> None:
    """Call `greet` with each connection in a new thread, until the listener is closed.

    is_closed: Returns whether the caller is closing the listener. It must return True before `close` is called.
    """
    while True:
        try:
            connected, _ = listener.accept()
        except OSError:
            if is_closed():
                return
            # Either the peer has closed the connection at once, or this process has no free file descriptors at the moment.
            time.sleep(_AGAIN_S)
            continue
        # Use one thread for each connection, so that a silent client delays no other client.
        threading.Thread(target=greet, args=(connected,), daemon=True).start()


def close(listener: socket.socket) -> None:
    """Close a listener and wake the thread in `accept_each`."""
    with contextlib.suppress(OSError):
        # Shut the socket down: closing alone would not wake the thread in accept().
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
