"""Elastic runs on hosts that are cut off and come back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runs import states
from paceline.targets.configured import Configured, add
from tests.engines.elastic import COUNTS, began_at, wait_for_attempt, wait_for_step
from tests.engines.hosts import Hosts
from tests.engines.lab import Lab, wait_for_end


@pytest.fixture
def gate(ssh_network: Hosts) -> Iterator[Path]:
    """A file that is not there, where all hosts and this machine would see it. In the end, all hosts are up."""
    path = ssh_network.folder / "gate_elastic"
    yield path
    path.unlink(missing_ok=True)
    for name in ssh_network.names:
        if name in ssh_network.up_now:
            ssh_network.heal(name)
        else:
            ssh_network.boot(name)


def test_a_run_goes_on_without_the_hosts_that_are_lost_and_with_those_that_come_back(
    lab: Lab, ssh_network: Hosts, gate: Path
) -> None:
    hosts = ssh_network
    settings = {
        "hosts": list(hosts.names),
        "ssh_config": str(hosts.ssh_config),
        "python": sys.executable,
        "silence_s": 5,
    }
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))
    hosts.kill("pa2")  # it starts with what there is

    run = lab.submit(
        COUNTS,
        arguments=[str(gate)],
        node_count=(1, 3),
        distributed_backend="gloo",
        compute_target="lab",
        elastic_seconds=1,
    )
    assert wait_for_attempt(run, 1, 2).nodes == ("pa0", "pa1")
    wait_for_step(run, 5)
    hosts.cut("pa0")  # the first node, whose rank 0 has the checkpoint

    assert wait_for_attempt(run, 2, 1).nodes == ("pa1",)
    hosts.heal("pa0")
    hosts.boot("pa2")
    third = wait_for_attempt(run, 3, 3)
    assert (third.nodes, third.reason) == (("pa0", "pa1", "pa2"), "more nodes")
    assert 5 <= began_at(run, 2) < began_at(run, 3)
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED
    assert [attempt.cause for attempt in run.record().attempts] == ["node_lost", "resized", None]
    assert run.record().size == "nodes 3 of 1..3"
