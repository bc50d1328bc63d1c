"""Authenticate peers by a shared secret: HMAC tags of messages, and a mutual challenge.

The process that starts the ranks creates the secret. This process is the supervisor (a new secret for each attempt) or
`horovodrun`. The ranks get the secret in their environment. The secret is never in a file or a command line.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

#: Variable with a run's secret: 32 bytes or more, as hexadecimal digits.
RUN_SECRET_VARIABLE = "PACELINE_RUN_SECRET"
TAG_BYTES = 32
_PROOF_S = 20


def tag(key: bytes, purpose: str, data: bytes | memoryview) -> bytes:
    """Return a tag that proves that the writer of `data` knows `key`.

    Args:
        key: The shared secret.
        purpose: A name for the use of `data`, so that a tag for one use is refused in another.
        data: The signed bytes.

    Returns:
        The HMAC-SHA256 (RFC 2104) of purpose and data, `TAG_BYTES` long.
    """
    digest = hmac.new(key, f"{purpose}\0".encode(), "sha256")
    digest.update(data)
    return digest.digest()


def is_tag(candidate: bytes, key: bytes, purpose: str, data: bytes) -> bool:
    """Return whether `candidate` is the tag of `data`, comparing in constant time."""
    return hmac.compare_digest(candidate, tag(key, purpose, data))


def authenticate(sock: socket.socket, key: bytes, *, is_client: bool) -> Connection:
    """Authenticate mutually with a peer. Return a connection that owns the socket.

    Raises:
        ConnectionError: The peer does not know the key, or is not a process of Paceline. The socket is closed.
    """
    connection = Connection(sock.detach())
    # While one side challenges, the other side answers.
    steps = (answer_challenge, deliver_challenge) if is_client else (deliver_challenge, answer_challenge)
    try:
        for step in steps:
            step(connection, key)
    except Exception as error:
        connection.close()
        # A peer with another protocol causes OSError, EOFError, ValueError or AssertionError inside `multiprocessing`.
        reason = "it has another key" if isinstance(error, AuthenticationError) else str(error) or type(error).__name__
        raise ConnectionError(f"the handshake failed: {reason}") from error
    return connection


def serve_each(listener: socket.socket, key: bytes, serve: Callable[[Connection], object]) -> None:
    """Accept connections forever, and serve each client that knows `key` in a thread.

    A client has 20 s for its proof. If `serve` raises an error, only the connection of that call ends.
    """
    from paceline.system.listening import accept_each, limit_silence

    def greet(accepted: socket.socket) -> None:
        with socket.socket(fileno=os.dup(accepted.fileno())) as same:
            limit_silence(same, _PROOF_S)
            try:
                connection = authenticate(accepted, key, is_client=False)
            except ConnectionError:
                return
            limit_silence(same, 0)
        with connection:
            serve(connection)

    accept_each(listener, greet)
