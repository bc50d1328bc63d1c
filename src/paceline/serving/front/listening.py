"""The listening socket: bound or inherited, and closed without losing a connection that was made already."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

from paceline.errors import ServingError
from paceline.serving.config import ServerConfig
from paceline.system.listening import listen_at

_BACKLOG = 2048
_SO_ATTACH_FILTER = 26


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens.

    Raises:
        ServingError: the port is taken, the address is none of this machine's, or `listen_fd` is no listening socket.
    """
    if config.listen_fd is not None:
        try:
            found = socket.socket(fileno=config.listen_fd)
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("it does not listen")
        except OSError as error:
            raise ServingError(
                f"listen_fd={config.listen_fd} is no listening socket that this process has inherited: {error}."
            ) from error
        os.set_inheritable(config.listen_fd, False)
        return found
    try:
        return listen_at(config.host, config.port, _BACKLOG)
    except OSError as error:
        raise ServingError(
            f"can't listen at host={config.host!r}, port={config.port}: {error.strerror or error}. Take another port, or 0 for "
            "a free one."
        ) from error


def refuse_new(listener: socket.socket) -> None:
    """Let the kernel drop all that would make another connection; those in the queue stay to be accepted.

    A listening socket that is closed resets what waits in its queue, and between the last accept and the close one more might
    come. So a packet filter first drops everything that comes to this socket (socket(7), SO_ATTACH_FILTER); connections that
    were made have sockets of their own. Nothing happens where the system has no such thing.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def has_waiting(listener: socket.socket) -> bool:
    """True where a connection waits to be accepted."""
    import select

    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
