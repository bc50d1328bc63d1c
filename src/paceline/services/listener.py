"""The socket at which a service listens. It is held beside the servers, so that clients wait, and are not refused, while there is
none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys

from paceline.errors import ServiceError
from paceline.system.listening import listen_at

#: Connections that wait to be taken; the kernel's own limit (net.core.somaxconn) may be lower.
_BACKLOG = 4096
_SO_DETACH_FILTER = 27


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens there. port: 0 for a free one.

    Raises:
        ServiceError: the port is taken or may not be, or the host is none of this machine's.
    """
    try:
        return listen_at(host, port, _BACKLOG)
    except socket.gaierror as error:
        raise ServiceError(f"host={host!r}: {error.strerror or error}. Name an address of this machine.") from error
    except OSError as error:
        raise ServiceError(_reason(error, host, port)) from error


def let_in(listener: socket.socket) -> None:
    """Let connections come to the socket again, after a server that shared it has ended: it has kept them away, so that none was
    lost with it (`paceline.serving.front.listening`). A client that came meanwhile asks again by itself, after a second.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):  # it was not kept away
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def check_free(host: str, port: int) -> None:
    """Refuse a port that a service could not have, before anything of it is there.

    Raises:
        ServiceError: as for `open_listener`.
    """
    open_listener(host, port).close()


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port={port} of {host} is taken by another program. Name another port, or 0 for a free one."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port={port} of {host} is not for user {os.geteuid()}. Name one from 1024 on, or 0 for a free one."
    return f"{host}, port {port}: {error.strerror or error}. Name an address of this machine."
