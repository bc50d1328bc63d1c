"""Listen for connections of tasks on a placement group's nodes, which authenticate with a token."""

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
    """A node's connection to the supervisor, and the first message that it sent."""

    sock: socket.socket
    told: Mapping[str, Any]


class Reception:
    """A port to which a Ray task on each node connects.

    `taken` maps each connected node's rank to its connection. Tasks connect to `port`, and send `token`.

    Args:
        on_taken: Called after each connection.
        host: The local address to listen at; "" for all addresses, if only Ray knows at which address nodes reach this machine.
    """

    def __init__(self, on_taken: Callable[[], None] = lambda: None, host: str = "") -> None:
        self._on_taken = on_taken
        self.token = secrets.token_hex(24)
        self.taken: dict[int, Taken] = {}
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Port 0: the kernel chooses a free port.
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        # Lock for `taken` and `_closed`. Without it, a connection could be added after `close` has closed all connections.
        self._guard = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="paceline-ray-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close connections that no link has taken over. Idempotent."""
        with self._guard:
            self._closed = True
        listening.close(self._listener)
        for taken in self.taken.values():
            taken.sock.close()

    def _accept(self) -> None:
        listening.accept_each(self._listener, self._greet, lambda: self._closed)

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_HELLO_S)
            told = json.loads(_read_line(sock))
            rank = int(told["rank"])
            # Any process may connect, so check the token, in constant time.
            if not hmac.compare_digest(str(told["token"]).encode(), self.token.encode()):
                raise ValueError
            # Clear the timeout, because the link that uses this socket sets its own timeouts.
            sock.settimeout(None)
            with self._guard:
                # Each rank connects once, so a second connection for a rank is not from Paceline's task.
                if self._closed or rank in self.taken:
                    raise ValueError
                self.taken[rank] = Taken(sock=sock, told={**told, "token": None})
            self._on_taken()
        except (OSError, ValueError, KeyError, TypeError):
            sock.close()


def _read_line(sock: socket.socket) -> bytes:
    """Read one line from a socket, and no byte after it."""
    line = b""
    while not line.endswith(b"\n"):
        # Read single bytes: a larger read could take bytes after the line's end, which belong to the next reader.
        byte = sock.recv(1)
        if not byte or len(line) > _HELLO_BYTES:
            raise ValueError
        line += byte
    return line
