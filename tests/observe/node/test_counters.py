"""Bytes over TCP, counted for those processes that have the connections."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from paceline.observe.node import counters
from paceline.observe.node.counters import TcpCounts, connections
from tests.helpers import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the kernel's sock_diag")


def test_tcp_counters_follow_sent_and_received_bytes():
    try:
        list(connections())
    except OSError as error:
        pytest.skip(f"this kernel does not tell of connections: {error}")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            counts = TcpCounts()
            assert counts.look({"0": [os.getpid()]}) == {}
            client.sendall(b"x" * 300_000)
            left = 300_000
            while left:
                left -= len(there.recv(left))
            found: list[tuple[float, float]] = []

            def is_told():
                found.append(counts.look({"0": [os.getpid()], "1": []}).get("0", (0.0, 0.0)))
                return found[-1][0] > 0

            wait_until(is_told, "the kernel has counted")
            # This process sends and receives, because it has both ends of the connection.
            assert found[-1][1] > 0


def test_tcp_counters_are_empty_if_the_kernel_refuses_permission(monkeypatch):
    def refuses():
        raise PermissionError

    monkeypatch.setattr(counters, "connections", refuses)
    counts = TcpCounts()
    assert counts.look({"0": [os.getpid()]}) == {}
    monkeypatch.setattr(counters, "connections", lambda: 1 / 0)
    assert counts.look({"0": [os.getpid()]}) == {}
