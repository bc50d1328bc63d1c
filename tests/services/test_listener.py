from __future__ import annotations

import socket
import threading

from paceline.services.listener import ConnectionRelay
from tests.helpers import wait_until


def server(text: bytes) -> socket.socket:
    """A server that answers each line with `text` until its client has nothing more to say."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                for _ in lines:
                    connection.sendall(text)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_service_relay_sends_new_connections_to_the_current_server() -> None:
    with server(b"one\n") as one, server(b"two\n") as two, socket.create_server(("127.0.0.1", 0)) as listener:
        relay = ConnectionRelay(listener)
        address = listener.getsockname()
        with socket.create_connection(address, timeout=60) as first, first.makefile("rb") as lines:
            first.sendall(b"hello\n")  # there is no server yet, so the line waits
            relay.place = one.getsockname()
            assert lines.readline() == b"one\n"
            relay.place = two.getsockname()
            first.sendall(b"hello\n")
            assert lines.readline() == b"one\n"
            with socket.create_connection(address, timeout=60) as second, second.makefile("rb") as others:
                second.sendall(b"hello\n")
                second.shutdown(socket.SHUT_WR)
                # The client has closed its sending side, but the relay still passes the whole answer on.
                assert others.read() == b"two\n"
            assert relay.open >= 1
        wait_until(lambda: relay.open == 0, "both connections have ended")
        with socket.create_connection(address, timeout=60) as third:
            wait_until(lambda: relay.open == 1, "a third one is there")
            relay.close()
            assert third.recv(1) == b""
        one.shutdown(socket.SHUT_RDWR)
        two.shutdown(socket.SHUT_RDWR)
