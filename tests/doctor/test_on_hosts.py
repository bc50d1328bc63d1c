"""The whole examination over real agents: on this machine, and on hosts in network namespaces, one of them cut off."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.doctor import connections
from paceline.doctor import doctor as doctor_module
from paceline.doctor.doctor import examine
from paceline.doctor.examination import Finding
from paceline.remote.link import Link, bootstrap_words
from paceline.targets.local import ThisMachine
from paceline.targets.status import NodeStatus, Status
from tests.engines import hosts as hosts_module
from tests.engines.conftest import require_engine
from tests.engines.hosts import Hosts
from tests.engines.lab import SYSTEM, WHEEL, find_mpirun

LIBRARY = Path(paceline.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require_engine("network namespaces", hosts_module.missing() is None)
    with Hosts("h6d").up(2) as running:
        yield running


def over(hosts: Hosts) -> Any:
    """A target whose nodes are these hosts. The links go into the namespaces past the network, so that a host that is
    cut off can still be asked what it sees."""

    @contextlib.contextmanager
    def nodes() -> Iterator[list[Link]]:
        with contextlib.ExitStack() as stack:
            links = []
            for name in hosts.names:
                words = hosts.words(name, bootstrap_words(sys.executable))
                links.append(Link.open(words, name=name, library_dir=LIBRARY, folder="/tmp/paceline-doctor-test"))
                stack.callback(links[-1].close)
            yield links

    return SimpleNamespace(
        kind="toy", examine=nodes, status=lambda: Status(nodes=tuple(NodeStatus(name=name) for name in hosts.names))
    )


def of(findings: list[Finding], check: str) -> list[tuple[str | None, str]]:
    return [(finding.node, finding.level) for finding in findings if finding.check == check]


# Only `make proof` runs this test: the next test runs the same checks on hosts, and test_reduce.py covers two processes
# on one node.
@pytest.mark.proof
def test_doctor_passes_on_this_machine(tmp_path):
    require_engine("torch", importlib.util.find_spec("torch"))
    require_engine("mpi4py", importlib.util.find_spec("mpi4py"))
    require_engine("Open MPI", find_mpirun(WHEEL) or find_mpirun(SYSTEM))
    findings = list(examine(ThisMachine(), tmp_path))
    assert [finding for finding in findings if finding.level == "fail"] == []
    assert of(findings, "gloo all-reduce") == [(None, "ok")]
    assert of(findings, "mpi all-reduce") == [(None, "ok")]
    assert "4 MiB among 2 processes of one node" in findings[-1].seen


def test_healthy_hosts_run_an_all_reduce_over_their_common_network(hosts, tmp_path):
    require_engine("torch", importlib.util.find_spec("torch"))
    require_engine("mpi4py", importlib.util.find_spec("mpi4py"))
    require_engine("Open MPI", find_mpirun(WHEEL) or find_mpirun(SYSTEM))
    findings = list(examine(over(hosts), tmp_path))
    assert [finding for finding in findings if finding.level == "fail"] == []
    first, second = hosts.names
    assert of(findings, "reach") == [(first, "ok"), (second, "ok")]
    assert of(findings, "ports") == [(None, "ok")]
    (network,) = [finding.seen for finding in findings if finding.check == "network"]
    assert network == f"{first} {hosts.addresses[first]} (eth0), {second} {hosts.addresses[second]} (eth0)"
    for check in ("gloo all-reduce", "mpi all-reduce"):
        (seen,) = [finding.seen for finding in findings if finding.check == check and finding.level == "ok"]
        assert seen.startswith("4 MiB among 2 nodes over eth0: ")
    sharing = [finding.seen for finding in findings if finding.check == "sharing"]
    assert "each node's own" in sharing[0]
    for name in hosts.names:
        names = ["-name", "paceline-????????", "-o", "-name", ".doctor-*"]
        left = hosts.run(name, ["find", "/tmp", "/dev/shm", *names]).stdout
        assert left == "", "scratch folders are removed, and what the doctor wrote"


@pytest.mark.promise("doctor-names-node-do-gives")
def test_port_check_of_the_doctor_fails_if_a_host_is_cut_off_from_the_other(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_CONNECT_S", 4.0)
    only = [check for check in doctor_module._ON_NODES if check[0] in ("the network", "connections between the nodes")]
    monkeypatch.setattr(doctor_module, "_ON_NODES", tuple(only))
    hosts.cut(hosts.names[1])
    try:
        findings = list(examine(over(hosts), tmp_path))
    finally:
        hosts.heal(hosts.names[1])
    assert of(findings, "network") == [(None, "ok")]
    assert of(findings, "ports") == [(name, "fail") for name in hosts.names]
    assert hosts.addresses[hosts.names[1]] in findings[-2].seen
