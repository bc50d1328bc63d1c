"""How a program that forks hears what it is asked for (`hand_over.ask`): at a socket come a file with what is told, and the
descriptors that the fork is to have.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
from typing import Any


def listening(path: str) -> socket.socket:
    """A socket at this path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Under its name only when it listens: whoever sees it may connect.
    listener.bind(f"{path}~")
    listener.listen(64)
    os.rename(f"{path}~", path)
    return listener


def take(connection: socket.socket) -> list[int]:
    """What is told, as a file, and the script's descriptors; nothing where whoever connected was killed before it asked, as
    mpirun kills the ranks that are left."""
    try:
        return socket.recv_fds(connection, 64, 253)[1]
    except ConnectionError:
        return []


def taken_over(fds: list[int]) -> dict[str, Any]:
    """In a fork: what is told. The descriptors get the numbers that they are to have, and all others are closed."""
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        told: dict[str, Any] = marshal.load(file)
    put(fds[1:], told["fds"])
    return told


def put(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that they have where they come from; nothing else is left open."""
    free = max(*fds, *numbers) + 1
    moved = [os.dup2(fd, free + place) for place, fd in enumerate(fds)]
    os.closerange(0, free)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def tell(connection: socket.socket, number: int) -> None:
    """Answer whoever has asked: nobody hears it where that one is gone."""
    with contextlib.suppress(OSError):
        connection.send(str(number).encode())
