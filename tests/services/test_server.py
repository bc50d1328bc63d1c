"""When a server counts as one that hangs."""

from __future__ import annotations

import os

import pytest

from paceline.services import server
from paceline.services.server import Heartbeat


def test_server_counts_as_hanging_if_its_heartbeat_stops_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    beat = Heartbeat()
    server_fd = os.dup(beat.fd)
    beat.handed_on()
    # Before its first heartbeat, a server may need an hour to hash a large model.
    now[0] += 3600
    assert not beat.is_silent()
    os.write(server_fd, b"..")
    assert not beat.is_silent()
    now[0] += server.SILENT_S
    assert not beat.is_silent()
    now[0] += 1
    assert beat.is_silent()
    os.write(server_fd, b".")
    assert not beat.is_silent()
    os.close(server_fd)
    assert not beat.is_silent()
    beat.close()
    beat.close()
