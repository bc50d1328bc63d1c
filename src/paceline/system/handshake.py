"""Proofs that the other side knows a shared secret: message tags (HMAC-SHA256, RFC 2104) and a mutual challenge.

The secret of a run is made by whoever starts its ranks: the supervisor for each attempt, `horovodrun` for each job. The ranks
get it in their environment. It is never written to a file or a command line.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

#: Holds a run's secret: 32 bytes or more, as hexadecimal digits.
RUN_SECRET_VARIABLE = "PACELINE_RUN_SECRET"
TAG_BYTES = 32


def tag(key: bytes, purpose: str, data: bytes) -> bytes:
    """Return a proof that the writer of `data` knows `key`.

    Args:
        key: The shared secret.
        purpose: Where `data` is used, so that a tag from one place is refused in another.
        data: The signed bytes.

    Returns:
        `TAG_BYTES` bytes.
    """
    digest = hmac.new(key, f"{purpose}\0".encode(), "sha256")
    digest.update(data)
    return digest.digest()


def is_tag(candidate: bytes, key: bytes, purpose: str, data: bytes) -> bool:
    """Return whether `candidate` is the tag of `data`, in constant time."""
    return hmac.compare_digest(candidate, tag(key, purpose, data))


def prove_as_client(sock: socket.socket, key: bytes) -> Connection:
    """Prove knowledge of `key` to the server, check the server's own proof, and take over the socket.

    Raises:
        ConnectionError: The server does not know the key, or is not a server of Paceline. The socket is closed.
    """
    connection = Connection(sock.detach())
    try:
        # The server takes the two steps in the opposite order: while one side asks, the other answers.
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except Exception as error:
        connection.close()
        raise _refusal(error) from error
    return connection


def prove_as_server(sock: socket.socket, key: bytes) -> Connection:
    """Check the client's proof, prove knowledge of `key` to the client, and take over the socket.

    Raises:
        ConnectionError: The client does not know the key, or is not a process of Paceline. The socket is closed.
    """
    connection = Connection(sock.detach())
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except Exception as error:
        connection.close()
        raise _refusal(error) from error
    return connection


def serve_each(listener: socket.socket, key: bytes, serve: Callable[[Connection], None]) -> None:
    """Accept connections forever, and call `serve` with each that has proved knowledge of `key`, in a thread each.

    `serve` may raise any error of a broken connection, which ends that connection only.
    """
    from paceline.system.listening import accept_each

    def greet(accepted: socket.socket) -> None:
        try:
            connection = prove_as_server(accepted, key)
        except ConnectionError:
            return
        with connection:
            serve(connection)

    accept_each(listener, greet)


def _refusal(error: Exception) -> ConnectionError:
    # Besides AuthenticationError (another key), a peer that speaks another protocol causes OSError, EOFError, ValueError or
    # AssertionError inside `multiprocessing`.
    reason = "it has another key" if isinstance(error, AuthenticationError) else str(error) or type(error).__name__
    return ConnectionError(f"the handshake failed: {reason}")
