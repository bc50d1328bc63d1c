from __future__ import annotations

import errno
import socket
import threading

import pytest

from paceline.system.listening import accept_each, close, is_loopback, listen_at


def test_loopback_addresses_are_recognized():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LocalHost")] == [True] * 5
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example.org")] == [False] * 5


def test_a_port_that_is_taken_is_an_error_and_leaves_no_socket():
    with listen_at("127.0.0.1", 0, 1) as first, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1], 1)


def test_silent_client_does_not_block_other_clients_or_closing_the_listener():
    listener, is_closed, greeted = listen_at("127.0.0.1", 0, 8), threading.Event(), threading.Semaphore(0)

    def greet(connected: socket.socket) -> None:
        greeted.release()
        with connected:
            connected.recv(1)

    accepting = threading.Thread(target=accept_each, args=(listener, greet, is_closed.is_set))
    accepting.start()
    with socket.create_connection(listener.getsockname()), socket.create_connection(listener.getsockname()):
        assert greeted.acquire(timeout=60)
        assert greeted.acquire(timeout=60)
    is_closed.set()
    close(listener)
    close(listener)  # closing again is harmless
    accepting.join(60)
    assert not accepting.is_alive()


def test_listener_accepts_further_connections_after_an_aborted_connection():
    """Regression: after one aborted connection, the rank that distributes mini-batches accepted no further connection.
    The other ranks waited forever."""

    class Breaking:
        tries = 0

        def accept(self):
            self.tries += 1
            if self.tries != 2:
                raise ConnectionAbortedError(errno.ECONNABORTED, "broken off")
            return here, ("127.0.0.1", 1)

    here, there = socket.socketpair()
    listener, taken = Breaking(), threading.Event()
    with here, there:
        accept_each(listener, lambda connected: taken.set(), lambda: listener.tries > 2)
        assert taken.wait(60)
