"""A pod that Kubernetes takes away: the other pods remember it for the next index 0, and a reader adds the reason."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt
from paceline.targets.kubernetes import allocate, hub
from paceline.targets.kubernetes.hub import Hub
from paceline.targets.kubernetes.look import explain
from paceline.targets.kubernetes.pod import PodFollower
from paceline.targets.kubernetes.ticket import PodTicket
from tests.engines.container_lab import free_ports
from tests.helpers import make_run, wait_until

LIMIT_S = 30.0


def ticket() -> PodTicket:
    (port,) = free_ports(1)
    texts = {"run_id": "r", "job": "j", "workspace": "w", "key": secrets.token_hex(32), "library": "l"}
    return PodTicket(**texts, port=port, node_count=2, gang_wait_s=300.0, silence_s=15.0)


@pytest.mark.parametrize(("is_preempted", "remembered"), [(True, (1, 1)), (False, (1, 0))])
def test_new_first_pod_is_told_by_another_pod_whether_its_predecessor_was_preempted(
    tmp_path: Path, is_preempted: bool, remembered: tuple[int, int]
) -> None:
    first, second = ticket(), ticket()
    follower = PodFollower(first, 1, "127.0.0.1")
    follower._attempts = 1  # the pod has already run one agent
    old = Hub(first, RunFolder(tmp_path))
    with follower._connect("127.0.0.1", follower._about()) as connection:
        assert old.attempts(LIMIT_S) == (1, 0)
        old.end(is_over=False, is_preempted=is_preempted)
        follower._wait(connection)
    if is_preempted:
        old.wait_for_others(LIMIT_S)
        assert old._told == {1}

    follower._ticket = second
    new = Hub(second, RunFolder(tmp_path))
    with follower._connect("127.0.0.1", follower._about()):
        assert new.attempts(LIMIT_S) == remembered


def test_preempted_attempt_gets_the_reason_reported_by_kubernetes_instead_of_a_generic_reason(
    tmp_path: Path,
) -> None:
    times = {"started_utc": "2026-11-29T05:00:00.000Z", "ended_utc": "2026-11-29T05:01:00.000Z"}
    generic = "preempted: Kubernetes ends pod pl-a-1-10: an eviction, a preemption or a drained node"
    attempts = (
        Attempt(number=1, nodes=("pl-a-1-0", "pl-a-1-10"), cause="preempted", **times),
        Attempt(number=2, nodes=("pl-a-1-0", "pl-a-1-10"), reason=generic, cause="preempted", **times),
        Attempt(number=3, nodes=("pl-a-1-0", "pl-a-1-10"), reason=generic, **times),
    )
    folder, fd = make_run(tmp_path / "runs", status=states.COMPLETED, attempts=attempts)
    os.close(fd)
    # Only one of these messages is about a pod of the run: the name of the other pod is almost the same.
    said = [
        "Pod pl-a-1-1-x: it was evicted (y).",
        "Pod pl-a-1-10-abc: it was preempted by a pod of higher priority (z).",
    ]

    explain(folder, {"ends": {str(number): ["preempted", text] for number, text in enumerate(said)}})

    assert [attempt.reason for attempt in store.stored(folder).attempts] == [
        None,
        f"preempted: {said[1][:-1]}",
        generic,
    ]


def test_failure_cause_node_lost_becomes_preempted_if_kubernetes_reports_an_evicted_pod(tmp_path: Path) -> None:
    failure = FailureReport(cause="node_lost", message="The node was lost.")
    folder, fd = make_run(tmp_path / "runs", status=states.FAILED, failure=failure)
    os.close(fd)

    explain(folder, {"ends": {"u": ["preempted", "Pod p: it was evicted (drain)."]}})

    found = store.stored(folder).failure
    assert found is not None
    assert (found.cause, found.message) == ("preempted", "Pod p: it was evicted (drain). The node was lost.")


def test_end_of_the_pod_that_the_failure_names_is_its_cause_although_another_pod_ended_later(tmp_path: Path) -> None:
    failure = FailureReport(cause="node_lost", message="Node p-1 was lost.", node="p-1")
    folder, fd = make_run(tmp_path / "runs", status=states.FAILED, failure=failure)
    os.close(fd)
    ends = {"a": ["memory", "Pod p-1-x: out of memory."], "b": ["preempted", "Pod p-10-x: it was evicted (drain)."]}

    explain(folder, {"ends": ends})

    found = store.stored(folder).failure
    assert found is not None
    assert found.cause == "memory"


def test_supervisor_receives_the_name_of_the_pod_that_kubernetes_preempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hub, allocate):
        monkeypatch.setattr(module, "HUB_SOCKET", str(tmp_path / "hub.sock"))
    described = ticket()
    served = Hub(described, RunFolder(tmp_path))
    served.begin()
    gathering = allocate.PodGathering(described)
    names = {0: "pl-a-1-0", 1: "pl-a-1-1"}
    wait_until(lambda: served._supervisor is not None, "the supervisor is connected")
    assert gathering.leave_reason(names) == ""

    PodFollower(described, 1, "127.0.0.1")._connect("127.0.0.1", {"what": "leaving", "rank": 1}).close()

    wait_until(lambda: gathering.leave_reason(names), "the supervisor knows")
    assert gathering.leave_reason(names).startswith("Kubernetes ends pod pl-a-1-1: an eviction")
    assert gathering.leave_reason({0: "pl-a-1-0"}) == ""
