"""Texts of a real cluster become reasons for people."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.targets.kubernetes import reasons
from paceline.targets.kubernetes.objects import BatchJob, ClusterEvent, Pod


def job(count: int = 1, *, suspend: bool = False) -> BatchJob:
    return {"metadata": {"name": "pl-x", "uid": "u"}, "spec": {"completions": count, "suspend": suspend}, "status": {}}


def pod(index: int = 0, *, state: Any = None, conditions: Any = (), **status: Any) -> Pod:
    containers = [{"name": "paceline", "state": state}] if state is not None else []
    return {
        "metadata": {
            "name": f"pl-x-{index}-abcde",
            "uid": "p",
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "status": {"conditions": list(conditions), "containerStatuses": containers, **status},  # type: ignore[typeddict-item]
    }


def unscheduled(text: str) -> Any:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}]


def refusal(text: str) -> list[ClusterEvent]:
    return [{"reason": "FailedCreate", "message": f'Error creating: pods "pl-x-0-abcde" is forbidden: {text}'}]


RUNNING = {"running": {"startedAt": "2026-11-29T00:00:00Z"}}
NO_ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/2 nodes."


def test_unschedulable_pods_are_reported_with_the_lacking_resource():
    found = reasons.waits_for(job(2), [pod(0, state=RUNNING), pod(1, conditions=unscheduled(NO_ROOM))], [])

    assert found == "1 of 2 pods, 0/2 nodes have enough free nvidia.com/gpu"


def test_several_scheduler_reasons_are_reported_unchanged():
    text = "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {gpu: true}. preemption: none."

    assert reasons.waits_for(job(), [pod(conditions=unscheduled(text))], []) == text.partition(". ")[0]


def test_exhausted_quota_is_reported_with_its_numbers():
    events = refusal("exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1")

    assert reasons.waits_for(job(), [], events) == "quota 'q' is used up: the pod needs pods=1; used pods=1 of pods=1"


def test_limit_range_violation_is_reported():
    events = refusal("maximum cpu usage per Container is 500m, but limit is 1")

    assert reasons.waits_for(job(), [], events).endswith("maximum cpu usage per Container is 500m, but limit is 1")


def test_refusals_before_a_successful_pod_creation_are_ignored():
    events = [*refusal("exceeded quota: q, requested: a, used: b, limited: c"), {"reason": "SuccessfulCreate"}]

    assert reasons.refused(events) is None  # type: ignore[arg-type]


def test_suspended_job_is_reported_with_the_message_of_its_queue():
    found = reasons.waits_for(job(suspend=True), [], [], "couldn't assign flavors to pod set main")

    assert found == "waits in its queue: couldn't assign flavors to pod set main"


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
def test_an_image_that_does_not_exist_ends_the_run(reason: str):
    state = {
        "waiting": {"reason": reason, "message": 'failed to pull image "nope:1": docker.io/library/nope:1: not found'}
    }
    end = reasons.hopeless([pod(state=state)])

    assert end is not None
    assert "nope:1" in end.message
    assert "setting image" in end.message


def test_a_registry_that_does_not_answer_is_waited_for():
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "dial tcp 10.0.0.1:443: i/o timeout"}}

    assert reasons.hopeless([pod(state=state)]) is None
    assert "i/o timeout" in reasons.waits_for(job(), [pod(state=state)], [])


@pytest.mark.parametrize(
    ("pod", "cause", "words"),
    [
        (pod(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}), "memory", "memory_per_worker"),
        (
            pod(
                state={"terminated": {"exitCode": 143, "reason": "Error"}},
                conditions=[
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "default-scheduler: preempting to accommodate a higher priority pod",
                    }
                ],
            ),
            "preempted",
            "preempted by a pod of higher priority",
        ),
        (
            pod(state=None, phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
            "preempted",
            "low on",
        ),
        (
            pod(
                state={
                    "terminated": {
                        "exitCode": 128,
                        "reason": "StartError",
                        "message": 'exec: "python3": executable file not found in $PATH',
                    }
                }
            ),
            "engine",
            "Python 3.10",
        ),
        (
            pod(
                state={
                    "terminated": {
                        "exitCode": 1,
                        "reason": "Error",
                        "message": "exec /usr/bin/python3: exec format error",
                    }
                }
            ),
            "engine",
            "another processor",
        ),
        (
            pod(
                state={
                    "terminated": {"exitCode": 70, "reason": "Error", "message": "paceline: the image's Python is 3.8"}
                }
            ),
            "engine",
            "could not begin: the image's Python is 3.8",
        ),
    ],
)
def test_ended_pod_is_reported_with_cause_and_next_step(pod: Pod, cause: str, words: str):
    end = reasons.ended(pod)

    assert end is not None
    assert end.cause == cause
    assert words in end.message


def test_pod_that_exits_with_the_preemption_code_has_no_failure():
    assert reasons.ended(pod(state={"terminated": {"exitCode": 75, "reason": "Error"}})) is None


def test_newest_running_pod_with_index_0_is_used_unless_it_is_terminating():
    old, new, leaving = (pod(0, state=RUNNING) for _ in range(3))
    old["metadata"]["creationTimestamp"] = "2026-11-29T00:00:00Z"
    new["metadata"]["creationTimestamp"] = "2026-11-29T00:01:00Z"
    leaving["metadata"] |= {"creationTimestamp": "2026-11-29T00:02:00Z", "deletionTimestamp": "2026-11-29T00:03:00Z"}

    assert reasons.running_pod([new, leaving, old, pod(1, state=RUNNING)], 0) is new


def test_the_digest_of_the_image_comes_from_the_pods_status():
    found = pod(state=RUNNING)
    found["status"]["containerStatuses"][0]["imageID"] = "docker.io/library/python@sha256:abc"

    assert reasons.last_digest([pod(), found]) == "docker.io/library/python@sha256:abc"
