"""The port on which the tasks of a placement group's nodes report, each with the run's token."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.system import listening

_HELLO_S = 20.0
_HELLO_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A node's connection, and what its task has said (`driver.hold`)."""

    sock: socket.socket
    told: Mapping[str, Any]


class Reception:
    """Listens. taken: node rank -> connection; port, token: what a task has to know. on_taken: called after each.

    host: the address of this machine to listen at; "" for all of them, where only Ray knows by which one nodes come.
    """

    def __init__(self, on_taken: Callable[[], None] = lambda: None, host: str = "") -> None:
        self._on_taken = on_taken
        self.token = secrets.token_hex(24)
        self.taken: dict[int, Taken] = {}
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Port 0: the kernel chooses a free one, which the tasks are told.
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        # Held for `taken` and `_closed` together, so that no connection comes in once `close` has gone through them.
        self._guard = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="paceline-ray-accept", daemon=True).start()

    def close(self) -> None:
        """Take nobody in any more, and close what no link has taken over. Harmless the second time."""
        with self._guard:
            self._closed = True
        listening.close(self._listener)
        for taken in self.taken.values():
            taken.sock.close()

    def _accept(self) -> None:
        listening.accept_each(self._listener, self._greet, lambda: self._closed)

    def _greet(self, sock: socket.socket) -> None:
        """Take a connection in if it brings the token; whatever else connects is shown the door."""
        try:
            sock.settimeout(_HELLO_S)
            told = json.loads(_read_line(sock))
            rank = int(told["rank"])
            # Whoever reaches the port may connect, so the token decides; compared in constant time.
            if not hmac.compare_digest(str(told["token"]).encode(), self.token.encode()):
                raise ValueError
            # From here on the link decides how long it waits.
            sock.settimeout(None)
            with self._guard:
                # Each node's task connects once; a second connection of a rank is none of the run's.
                if self._closed or rank in self.taken:
                    raise ValueError
                self.taken[rank] = Taken(sock=sock, told={**told, "token": None})
            self._on_taken()
        except (OSError, ValueError, KeyError, TypeError):
            sock.close()


def _read_line(sock: socket.socket) -> bytes:
    """Read up to the line's end and no further: what follows is the agent's."""
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte: what was read too far could not be given back to the link.
        byte = sock.recv(1)
        if not byte or len(line) > _HELLO_BYTES:
            raise ValueError
        line += byte
    return line
