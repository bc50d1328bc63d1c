"""Sockets that listen: at an address that others reach or nobody else does, and a thread for each connection."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

_AGAIN_S = 0.1


def is_loopback(host: str) -> bool:
    """True where nobody but this machine reaches the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there. port: 0 for a free one. backlog: connections that wait to be taken.

    Raises:
        OSError: the port is taken or may not be, or the host is none of this machine's (socket.gaierror: it has no address).
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        # Connections that have ended keep a port for a minute; without this a server could not come back for as long.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made


def accept_each(
    listener: socket.socket, greet: Callable[[socket.socket], None], is_closed: Callable[[], bool] = lambda: False
) -> None:
    """Call `greet` with each connection, in a thread of its own, until the listener is closed (`close`).

    is_closed: whether it is, which has to be known before it happens.
    """
    while True:
        try:
            connected, _ = listener.accept()
        except OSError:
            if is_closed():
                return
            # A connection that was broken off at once, or no descriptor left for the moment: others will come.
            time.sleep(_AGAIN_S)
            continue
        # A thread for each: one that connects and says nothing holds up nobody else.
        threading.Thread(target=greet, args=(connected,), daemon=True).start()


def close(listener: socket.socket) -> None:
    """Close it, and wake the thread that waits in `accept_each`. Harmless the second time."""
    with contextlib.suppress(OSError):
        # Closing alone would leave the thread waiting.
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
