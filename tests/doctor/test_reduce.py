"""The doctor's all-reduces over nodes that only say how it went."""

from __future__ import annotations

import pytest

from paceline.doctor.connections import check_network
from paceline.doctor.reduce import check_gloo, check_mpi
from paceline.doctor.reduce_mpi import open_mpi_of
from tests.doctor.conftest import answers

MPI = {"path": "/opt/mpi/bin/mpirun", "version": "5.0.3"}


@pytest.fixture
def known(examination):
    """Two nodes that have all of it, on a network."""
    modules = {name: {"version": "1"} for name in ("torch", "mpi4py")}
    examination.facts = {f"node{number}": {"modules": modules, "open_mpi": MPI} for number in (0, 1)}
    examination.interface = "eth0"
    assert [finding.level for finding in check_network(examination)] == ["ok"]
    return examination


def told(findings):
    return [(finding.check, finding.node, finding.level, finding.seen) for finding in findings]


def test_gloo_check_reports_the_time_of_the_slowest_rank(known, two):
    for link, ms in zip(two, (3.5, 12.25), strict=True):
        link.wrong = lambda argv, ms=ms: answers(f'PACELINE-ANSWERS {{"ms": {ms}, "size": 2}}')
    assert told(check_gloo(known)) == [
        ("gloo all-reduce", None, "ok", "4 MiB among 2 nodes over eth0: 12.2 ms"),
    ]


def test_failed_gloo_rank_is_reported_with_its_interface(known, two):
    two[0].wrong = lambda argv: answers('PACELINE-ANSWERS {"ms": 1.0, "size": 2}')
    two[1].lost = "node1: gone"
    assert told(check_gloo(known)) == [("gloo all-reduce", "node1", "fail", "over eth0: gone")]


@pytest.mark.parametrize(("size", "level"), [(2, "ok"), (1, "fail")])
def test_doctor_reports_mpi_processes_that_form_separate_worlds(known, monkeypatch, size, level):
    monkeypatch.setattr("paceline.doctor.reduce_mpi._prepare", lambda *_: "/socket")
    monkeypatch.setattr("paceline.doctor.reduce_mpi.make_remote_shell", lambda *_: ["rsh"])
    monkeypatch.setattr("paceline.doctor.reduce_mpi._reduced", lambda *_: {"ms": 2.0, "size": size})
    ((check, node, found, seen),) = told(check_mpi(known))
    assert (check, found) == ("mpi all-reduce", level)
    if level == "ok":
        assert (node, seen) == (None, "4 MiB among 2 nodes over eth0: 2.0 ms")
    else:
        assert seen.startswith("over eth0: 2 processes were started, and each world has 1: mpi4py is not of /opt/mpi")


@pytest.mark.parametrize("check", [check_gloo, check_mpi], ids=["gloo", "mpi"])
def test_all_reduce_check_is_skipped_without_a_common_network_or_torch_or_mpi4py_on_all_nodes(known, check):
    known.places = None
    assert [(level, seen) for _, _, level, seen in told(check(known))] == [("skipped", "no common network to try")]
    known.facts["node1"] = {}
    ((_, _, level, seen),) = told(check(known))
    assert (level, "not on all nodes" in seen) == ("skipped", True)


def test_open_mpi_is_checked_only_if_all_nodes_have_the_same_version(known):
    assert open_mpi_of(known) == ("/opt/mpi/bin/mpirun", 5)
    known.facts["node1"]["open_mpi"] = {"error": "not there"}
    assert open_mpi_of(known) is None
    known.facts["node1"]["open_mpi"] = MPI | {"version": "4.1.4"}
    assert open_mpi_of(known) is None


def test_gloo_check_of_a_single_node_starts_two_processes_on_it(known, two):
    known.patients = known.patients[:1]
    two[0].wrong = lambda argv: answers('PACELINE-ANSWERS {"ms": 1.0, "size": 2}')
    assert told(check_gloo(known))[0][3] == "4 MiB among 2 processes of one node over eth0: 1.0 ms"
    assert len(two[0].asked) == 2
