"""The connection between horovodrun and its ranks: peers without the key are ignored."""

from __future__ import annotations

import errno
import socket
import threading

import pytest

from paceline.compat.horovod.runner import wire
from paceline.compat.horovod.runner.wire import RankListener


def listening(key: bytes, heard: list[object]) -> tuple[tuple[str, int], threading.Thread]:
    """The address of a listener that takes one connection with this key."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            heard.append(wire.accept(listener.accept()[0], key))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[:2], thread


def test_rank_connects_to_the_second_address_if_the_first_belongs_to_a_job_with_another_key() -> None:
    heard_there: list[object] = []
    heard_here: list[object] = []
    other, first = listening(b"another", heard_there)
    ours, second = listening(b"ours", heard_here)
    connection = wire.connect([other, ours], b"ours")
    first.join(60)
    second.join(60)
    assert heard_there == [None]
    wire.send(connection, {"hello": 1})
    assert wire.receive(heard_here[0]) == {"hello": 1}  # type: ignore[arg-type]


def test_connecting_to_a_driver_that_has_another_key_raises_connection_error() -> None:
    other, thread = listening(b"another", [])
    with pytest.raises(ConnectionError, match=f"can't be reached at 127.0.0.1:{other[1]}: the handshake failed"):
        wire.connect([other], b"ours")
    thread.join(60)


def test_failed_accept_does_not_block_the_next_connection(monkeypatch):
    """Regression: the first failed `accept`, for example because the process had no free file descriptor, ended the
    listening thread."""
    failures = [errno.EMFILE, errno.ECONNABORTED]
    accept = socket.socket.accept

    def failing(listener):
        if failures:
            raise OSError(failures.pop(), "not now")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with RankListener(["127.0.0.1"]) as listener:
        connection = wire.connect(listener.addresses, listener.key)
        wire.send(connection, {"rank": 3})
        assert listener.joined.get(timeout=60)[1] == {"rank": 3}
        connection.close()
    assert not failures
