from __future__ import annotations

import os
import socket

from paceline.remote.agent import machine


def test_free_ports_are_those_that_nobody_listens_on(monkeypatch):
    (first,) = machine.free_ports(1)
    with socket.socket() as busy:
        busy.bind(("", first))
        busy.listen()
        found = machine.free_ports(3)
    assert first not in found
    assert len(set(found)) == 3


def test_a_port_that_is_taken_is_not_given_out(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(machine, "_PORTS", range(port, port + 1))
        assert machine.free_ports(1) == []
    assert machine.free_ports(1) == [port]
    assert machine.free_ports(1, {port}) == []


def test_a_user_without_a_name_has_a_number(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    assert machine.about({"library": "", "folder": ""})["user"] == "123456"
