"""The server to which the processes beside the ranks connect."""

from __future__ import annotations

import errno
import socket

from paceline.compat.horovod.runner import wire
from paceline.compat.horovod.runner.listener import RankListener


def test_a_connection_that_can_not_be_taken_does_not_keep_the_next_one_out(monkeypatch):
    """Story: the thread ended with the first error, such as a process without a descriptor left for a moment."""
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
