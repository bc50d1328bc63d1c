"""The port on which the tasks of a placement group's nodes report."""

from __future__ import annotations

import errno
import json
import socket
import threading

from paceline.targets.ray.listener import Reception


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
    taken = threading.Event()
    reception = Reception(taken.set, "127.0.0.1")
    try:
        with socket.create_connection(("127.0.0.1", reception.port)) as task:
            task.sendall(json.dumps({"rank": 2, "token": reception.token}).encode() + b"\n")
            assert taken.wait(60)
        assert list(reception.taken) == [2]
    finally:
        reception.close()
    assert not failures
