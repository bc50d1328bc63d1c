from __future__ import annotations

import os
import socket

import pytest

from paceline.agent import machine
from tests.helpers import write_program


def test_free_ports_are_those_that_nobody_listens_on(monkeypatch):
    (first,) = machine.free_ports(1)
    with socket.socket() as busy:
        busy.bind(("", first))
        busy.listen()
        found = machine.free_ports(3)
    assert first not in found
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("listing", "devices"), [("echo 0; echo 1", ("0", "1")), ("echo No devices were found", ()), ("echo 0; exit 9", ())]
)
def test_devices_are_those_that_the_driver_s_tool_lists(tmp_path, monkeypatch, listing, devices):
    write_program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\n{listing}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert machine.gpus() == devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5")
    assert machine.gpus() == ("3", "GPU-5")


def test_a_user_without_a_name_has_a_number(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    assert machine.user() == "123456"
