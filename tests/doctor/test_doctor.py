"""The examination as a whole: its order, and the faults that stop it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.doctor import doctor
from paceline.doctor.doctor import examine
from paceline.doctor.examination import Finding, worst
from paceline.errors import TargetError
from paceline.targets.status import NodeStatus, Status, Unreachable


def target_of(*links, status=None, opened=None):
    """A target with these nodes. opened: gets "in" and "out"."""

    @contextlib.contextmanager
    def nodes(node_count=None):
        if opened is not None:
            opened.append("in")
        yield list(links)[:node_count]
        if opened is not None:
            opened.append("out")

    return toy(nodes, status)


def toy(examine, status=None):
    return SimpleNamespace(
        kind="toy", examine=examine, status=status or (lambda: Status(nodes=(NodeStatus(name="n"),)))
    )


def after_status(findings):
    """Return the findings after the engine's own report, which has no fault."""
    first, *others = findings
    assert (first.check, first.node, first.level) == ("status", None, "ok")
    return others


@pytest.fixture
def no_checks(monkeypatch):
    """Run only the checks before those on nodes."""
    monkeypatch.setattr(doctor, "_ON_NODES", ())


def told(findings):
    return [(finding.check, finding.node, finding.level) for finding in findings]


def test_doctor_reports_the_target_status_and_down_nodes_before_reachable_nodes(two, tmp_path, no_checks):
    nodes = (NodeStatus(name="node0"), NodeStatus(name="node9", is_up=False, state="drained", message="fan broken"))
    findings = list(examine(target_of(*two, status=lambda: Status(nodes=nodes, queued=3)), tmp_path))
    assert told(findings) == [
        ("status", "node9", "warn"),
        ("status", None, "ok"),
        ("reach", "node0", "ok"),
        ("reach", "node1", "ok"),
    ]
    assert findings[0].seen == "drained: fan broken"
    assert findings[1].seen == "1 of 2 nodes up, 3 jobs waiting"


def test_doctor_reports_an_unresponsive_target_as_failed_and_still_checks_its_nodes(
    two, tmp_path, no_checks, monkeypatch
):
    monkeypatch.setattr(doctor, "STATUS_S", 0.1)
    never = threading.Event()
    findings = list(examine(target_of(two[0], status=never.wait), tmp_path))
    never.set()
    assert told(findings) == [("status", None, "fail"), ("reach", "node0", "ok")]
    assert findings[0].seen == "no answer in 0.1 s"


def test_a_node_that_cannot_be_reached_does_not_hide_the_others(two, tmp_path, no_checks):
    two[1].lost = "node1: Connection refused"
    gone = Unreachable(name="node7", lost="node7: No route to host")
    findings = after_status(examine(target_of(two[0], two[1], gone), tmp_path))
    assert told(findings) == [("reach", "node0", "ok"), ("reach", "node1", "fail"), ("reach", "node7", "fail")]
    assert findings[2].seen == "No route to host"


def test_doctor_allocates_and_releases_the_requested_number_of_nodes(two, tmp_path, no_checks):
    opened = []
    findings = after_status(examine(target_of(*two, opened=opened), tmp_path, node_count=1))
    assert told(findings) == [("reach", "node0", "ok")]
    assert opened == ["in", "out"]


@pytest.mark.promise("doctor-names-node-do-gives")
def test_doctor_releases_its_nodes_if_the_caller_closes_the_findings_generator_early(two, tmp_path, no_checks):
    opened = []
    findings: Any = examine(target_of(*two, opened=opened), tmp_path)
    next(findings)
    next(findings)
    findings.close()
    assert opened == ["in", "out"]


def test_nodes_allocated_after_the_doctor_timed_out_are_released(two, tmp_path):
    opened, go_on, is_out = [], threading.Event(), threading.Event()

    @contextlib.contextmanager
    def late():
        go_on.wait(120)
        opened.append("in")
        yield two
        opened.append("out")
        is_out.set()

    (failed,) = after_status(examine(toy(late), tmp_path, nodes_s=0.1))
    assert (failed.check, failed.level) == ("reach", "fail")
    assert failed.seen == "no nodes in 0.1 s: the queue is long, or a node hangs"
    go_on.set()
    assert is_out.wait(60)
    assert opened == ["in", "out"]


def test_doctor_quotes_the_error_of_a_target_that_refuses_nodes(tmp_path):
    def refuse():
        raise TargetError("partition 'gpu' is closed.")

    (failed,) = after_status(examine(toy(refuse), tmp_path))
    assert (failed.check, failed.level, failed.seen) == ("reach", "fail", "partition 'gpu' is closed.")


def test_doctor_skips_the_node_checks_if_the_kind_of_target_does_not_support_them(tmp_path):
    # This target lacks one of the two methods that `doctor` needs to examine nodes.
    (skipped,) = examine(SimpleNamespace(kind="plain", status=lambda: 1 / 0), tmp_path)
    assert (skipped.level, skipped.seen) == ("skipped", "targets of kind 'plain' can't be examined from within")


def test_doctor_examines_the_python_interpreter_of_the_targets_runs_unless_another_is_given(two, tmp_path, monkeypatch):
    # Regression: `paceline doctor` examined another environment than the environment of the runs, so it reported torch
    # as missing.
    looked_at = []
    monkeypatch.setattr(doctor, "_ON_NODES", (("", lambda examination: looked_at.append(examination.python) or ()),))
    target = target_of(*two)
    target.script_python = lambda links: f"/opt/{len(links)}/python"
    list(examine(target, tmp_path))
    list(examine(target, tmp_path, python="/mine"))
    assert looked_at == ["/opt/2/python", "/mine"]


def test_doctor_skips_remaining_checks_once_the_last_node_is_lost(two, tmp_path, monkeypatch):
    def loses(examination):
        for patient in examination.patients:
            patient.gone = "lost"
        yield Finding(check="clock", level="fail", seen="lost")

    monkeypatch.setattr(doctor, "_ON_NODES", (("clocks", loses), ("never", lambda examination: 1 / 0)))
    assert told(examine(target_of(two[0]), tmp_path))[2:] == [("clock", None, "fail"), ("nodes", None, "skipped")]


def test_doctor_reports_its_progress(two, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_ON_NODES", (("clocks", lambda examination: iter(())),))
    said = []
    list(examine(target_of(two[0]), tmp_path, say=said.append))
    assert said == ["the engine's status", "waiting for nodes", "clocks"]


def test_overall_level_is_the_worst_of_all_findings():
    levels = ["ok", "skipped", "warn", "fail"]
    findings = [Finding(check="x", level=level, seen="") for level in levels]
    assert [worst(findings[:count]) for count in range(5)] == ["ok", "ok", "ok", "warn", "fail"]
