"""Which nodes still live, their answers, and what examinations share."""

from __future__ import annotations

import time

import pytest

from paceline.doctor import examination
from paceline.doctor.examination import (
    NetworkPlace,
    NoAnswerError,
    Patient,
    answer_in,
    common_network,
    everywhere,
    same_machine,
)
from tests.doctor.conftest import LocalLink, answers, hangs

LO = {"lo": ("127.0.0.1", 8)}


def test_hanging_node_is_skipped_by_later_checks(two, monkeypatch):
    monkeypatch.setattr(examination, "_SLACK_S", 0.1)
    two[0].wrong = hangs
    patients = [Patient(link) for link in two]
    found = everywhere(patients, lambda patient: patient.run(["echo", "here"]).stdout, 12.0)
    assert found["node1"] == b"here\n"
    assert "gave no answer in 12.1 s" in str(found["node0"])
    with pytest.raises(NoAnswerError, match="was not asked again"):
        patients[0].run(["echo"])
    assert len(two[0].asked) == 1


def test_later_commands_run_on_a_node_after_a_command_timed_out(two):
    patient = Patient(two[0])
    with pytest.raises(NoAnswerError, match=r"no answer in 0\.1 s"):
        patient.run(["sleep", "5"], timeout_s=0.1)
    assert patient.run(["echo", "x"]).stdout == b"x\n"


def test_command_on_a_lost_node_raises_the_reason_of_the_loss(two):
    two[0].lost = "node0: nothing heard for 15 s"
    with pytest.raises(NoAnswerError, match="nothing heard for 15 s"):
        Patient(two[0]).run(["echo"])


def test_answer_of_a_node_is_parsed_from_the_marked_line_and_other_output_lines_are_ignored(two):
    two[0].wrong = lambda argv: answers('motd\nPACELINE-ANSWERS {"a": 1}\nbye\n')
    assert Patient(two[0]).ask("on_node", "facts", {}) == {"a": 1}


@pytest.mark.parametrize(
    ("stderr", "message"),
    [(b"Traceback\n  File\nKeyError: 'x'\n\n", "KeyError: 'x'"), (b"", "ended with 3 and said nothing")],
)
def test_last_error_line_of_a_program_without_an_answer_is_quoted(stderr, message):
    with pytest.raises(NoAnswerError, match=message):
        answer_in(b"nothing of ours", stderr, 3)


def test_exception_raised_by_a_check_on_one_node_is_returned_as_the_result_of_that_node(two):
    found = everywhere([Patient(link) for link in two], lambda patient: {}["x"], 60.0)
    assert str(found["node1"]) == "KeyError: 'x'"


def test_nodes_are_checked_concurrently(two):
    met = []

    def question(patient: Patient) -> bool:
        met.append(patient.name)
        deadline = time.monotonic() + 60
        while len(met) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(met) == 2

    assert everywhere([Patient(link) for link in two], question, 90.0) == {"node0": True, "node1": True}


def test_doctor_runs_commands_on_a_node_whose_name_has_shell_characters(tmp_path):
    link = LocalLink("a'b; $(c)", str(tmp_path / "x"))
    assert everywhere([Patient(link)], lambda patient: patient.run(["echo", "$(x)'"]).stdout, 60.0) == {
        "a'b; $(c)": b"$(x)'\n"
    }


def test_common_network_of_nodes_is_found_if_their_interface_names_differ():
    nodes = {
        "a": {**LO, "eth0": ("10.0.0.1", 24), "eth1": ("192.168.1.1", 24)},
        "b": {**LO, "eno1": ("10.0.0.2", 24)},
    }
    assert common_network(nodes) == {
        "a": NetworkPlace(interface="eth0", address="10.0.0.1", network="10.0.0.0/24"),
        "b": NetworkPlace(interface="eno1", address="10.0.0.2", network="10.0.0.0/24"),
    }


@pytest.mark.parametrize("bridge", ["docker0", "virbr0", "mybridge"])
def test_local_bridge_is_no_common_network(bridge):
    nodes = {"a": {bridge: ("172.17.0.1", 16)}, "b": {bridge: ("172.17.0.1", 16)}}
    assert common_network(nodes) is None


def test_two_node_names_are_one_machine_if_they_share_an_address_other_than_bridge_or_loopback():
    bridge = {"docker0": ("172.17.0.1", 16)}
    a, b = {"eth0": ("10.0.0.1", 24)}, {"eth0": ("10.1.0.1", 24)}
    assert same_machine({"one": {**a, **bridge}, "two": {**b, **bridge}, "three": {**a}}) == ["one", "three"]
    assert same_machine({"one": {**a, **bridge}, "two": {**b, **bridge}}) == []
    assert same_machine({"one": {**LO, **bridge}, "two": {**LO, **bridge}}) == []


def test_common_network_uses_the_requested_interface_and_is_none_if_no_node_has_it():
    nodes = {
        name: {"eth0": (f"10.0.0.{number}", 16), "ib0": (f"10.9.0.{number}", 24)}
        for number, name in enumerate(("a", "b"), start=1)
    }
    assert common_network(nodes)["a"].interface == "eth0"
    assert common_network(nodes, "ib0")["b"].address == "10.9.0.2"
    assert common_network(nodes, "ib7") is None


def test_single_node_uses_loopback_and_nodes_with_loopback_alone_have_no_common_network():
    assert common_network({"a": {**LO, "eth0": ("10.0.0.1", 24)}})["a"].address == "127.0.0.1"
    assert common_network({"a": LO, "b": LO}) is None
