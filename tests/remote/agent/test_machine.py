from __future__ import annotations

import os
import socket

import pytest

from paceline.remote.agent import machine
from tests.helpers import write_tree


def test_free_ports_skips_listening_ports(monkeypatch):
    (first,) = machine.free_ports(1)
    with socket.socket() as busy:
        busy.bind(("", first))
        busy.listen()
        found = machine.free_ports(3)
    assert first not in found
    assert len(set(found)) == 3


def test_port_in_use_is_not_offered_as_free(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(machine, "_PORTS", range(port, port + 1))
        assert machine.free_ports(1) == []
    assert machine.free_ports(1) == [port]
    assert machine.free_ports(1, {port}) == []


def test_user_without_a_name_is_reported_by_uid(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    assert machine.about({"library": "", "folder": ""})["user"] == "123456"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Puts these files in the place of /proc and /sys."""

    def make(files: dict[str, str]) -> None:
        top = write_tree(tmp_path / "system", files)
        monkeypatch.setattr(machine, "_read", lambda path: (top / path.lstrip("/")).read_text())

    return make


def vmstat(count: int) -> str:
    return f"nr_free_pages 5\noom_kill {count}\noom_kill_other 99\n"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 0),
        ({"proc/vmstat": vmstat(3)}, 3),
        ({"proc/vmstat": "nr_free_pages 5\n"}, 0),
        (
            {
                "proc/self/cgroup": "0::/user.slice/run\n",
                "sys/fs/cgroup/user.slice/run/memory.events": "oom 5\noom_kill 2\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n",
                "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            },
            1,
        ),
        (
            {
                "proc/vmstat": vmstat(3),
                "proc/self/cgroup": "0::/a:b\n",
                "sys/fs/cgroup/unified/a:b/memory.events": "oom_kill 4\n",
            },
            7,
        ),
        ({"proc/vmstat": vmstat(3), "proc/self/cgroup": "0::/gone\n"}, 3),
    ],
    ids=["nothing", "machine", "no such count", "group v2", "group v1", "both", "no group"],
)
def test_oom_kills_are_counted_for_machine_and_control_group(system, files, count):
    system(files)
    assert machine.oom_kills() == count


def test_oom_kill_count_of_this_machine_is_not_negative():
    assert machine.oom_kills() >= 0
    assert isinstance(machine._group_files(), list)
    assert all(isinstance(path, str) for path in machine._group_files())
