"""Hosts that could join an elastic run, by their own answers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.targets.ssh import probe as probe_module
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.probe import HostProbe
from paceline.targets.ssh.settings import read_settings
from tests.helpers import make_job


def probe(name: str, **values: Any) -> HostProbe:
    return HostProbe(**{"host": SshHost(name=name), "hostname": name, "boot_id": "1", "cores": 4, **values})


def ticket(cores: int, *gpus: str) -> dict[str, Any]:
    return {"cores": cores, "granted": {"gpus": gpus}}


LOOKS = (
    probe("free"),
    probe("enough", tickets=(ticket(2),)),
    probe("full", tickets=(ticket(3),)),
    probe("wanted", tickets=({"cores": 1, "granted": None},)),
    probe("down", failure="it does not answer"),
    # This is another name of a host that the run already has.
    probe("alias", hostname="held"),
)


def test_hosts_count_as_spare_if_they_have_room_and_no_run_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_at(ssh: Any, hosts: Any, **options: Any) -> list[HostProbe]:
        asked.extend(host.name for host in hosts)
        assert options["leave_open"] is False
        return [look for look in LOOKS if look.host.name in asked]

    monkeypatch.setattr(probe_module, "look_at", look_at)
    settings = read_settings("lab", {"hosts": ["held", *(look.host.name for look in LOOKS)]})
    job = make_job(node_count=(1, 9), process_count_per_node=2, distributed_backend="gloo")

    assert probe_module.spare_hosts(settings, job, {"held"}, {("1", "held")}) == 2
    assert "held" not in asked
    gpus = probe("free", gpus=("0", "1"), tickets=(ticket(1, "0"),))
    monkeypatch.setattr(probe_module, "look_at", lambda *_, **__: [gpus])
    assert (
        probe_module.spare_hosts(
            settings, make_job(node_count=(1, 2), distributed_backend="gloo", use_gpu=True), set(), ()
        )
        == 1
    )
    used = probe("free", gpus=("0", "1"), tickets=(ticket(1, "0"),), blocked={"1": "used by bob's python"})
    monkeypatch.setattr(probe_module, "look_at", lambda *_, **__: [used])
    one = make_job(node_count=(1, 2), distributed_backend="gloo", use_gpu=True)
    assert probe_module.spare_hosts(settings, one, set(), ()) == 0, "a process outside Paceline uses the other GPU"
    monkeypatch.setattr(probe_module, "look_at", lambda *_, **__: [gpus])
    two = make_job(node_count=(1, 2), process_count_per_node=2, distributed_backend="gloo", use_gpu=True)
    assert probe_module.spare_hosts(settings, two, set(), ()) == 0
