"""Explain why a run waits and how its pods ended, from the cluster's objects.

Descriptions quote the first sentence of Kubernetes' own messages, which people can search for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.targets.kubernetes.objects import condition_of, container_of, index_of, state_of
from paceline.targets.kubernetes.ticket import COMPLAINT, EXIT_AGAIN

if TYPE_CHECKING:
    from paceline.targets.kubernetes.objects import BatchJob, ClusterEvent, ContainerReason, Deployment, Pod

#: Reasons why a container can't start until the user corrects the image's name or the access to the image.
_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_NEVER = re.compile(
    r"not found|does not exist|InvalidImageName|invalid reference|not present with pull policy", re.IGNORECASE
)
_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (.*), used: (.*), limited: (.*)")
#: Number of last lines of an ended container to show.
_LAST_LINES = 8
_DISRUPTIONS = {
    "EvictionByEvictionAPI": "it was evicted, as when a node is drained",
    "PreemptionByScheduler": "it was preempted by a pod of higher priority",
    "DeletionByTaintManager": "its node was lost, or got a taint",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node ran out of a resource or shut down",
}


@dataclass(frozen=True)
class End:
    """How a pod ended: a failure cause, such as "node_lost" or "preempted", and a message."""

    cause: str
    message: str


def first_sentence(text: str) -> str:
    """Return a message's first sentence on one line, without its full stop."""
    return re.split(r"(?<=[^ .])\.(?: |$)", " ".join(text.split()), maxsplit=1)[0]


def waits_for(
    job: BatchJob, pods: Sequence[Pod], events: Sequence[ClusterEvent], queue: str = "", *, is_one_of_many: bool = False
) -> str:
    """Return why a run waits, such as "3 of 4 pods, 0/3 nodes have nvidia.com/gpu".

    events: Events of the Job, oldest first.
    queue: Message of Kueue about the Job; "" without one.
    is_one_of_many: Whether the Job has many runs. `pods` are then this run's pods.
    """
    if job["metadata"].get("deletionTimestamp"):
        return "its Job is being deleted"
    if job.get("spec", {}).get("suspend"):
        return f"waits in its queue: {queue}" if queue else "its Job is suspended, as Kueue does until there is room"
    count = 1 if is_one_of_many else job.get("spec", {}).get("completions", 1)
    current = [pod for pod in pods if not is_over(pod)]
    started = [pod for pod in current if "running" in state_of(pod)]
    head = f"{len(started)} of {count} pods, " if count > 1 else ""
    for pod in sorted(current, key=index_of):
        if pod not in started and (why := _waits(pod)):
            return f"{head}{why}"
    if len(current) < count and (refusal := refused(events)):
        return f"{head}{refusal}"
    if (last := _newest(filter(is_over, pods))) is not None:
        end = ended(last)
        if len(current) < count and end is not None:
            return f"{head}Kubernetes starts a pod again: {end.message}"
    if is_one_of_many and not current:
        at_once = job.get("spec", {}).get("parallelism", 1)
        return f"its Job runs at most {at_once} pods at the same time"
    return f"{head}the pods are being created" if len(started) < count else f"{head}the run begins"


def refused(events: Sequence[ClusterEvent]) -> str | None:
    """Return why Kubernetes refuses to create a Job's pods, or None."""
    for event in reversed(events):
        if event.get("reason") == "FailedCreate":
            text = " ".join(event.get("message", "").split())
            text = re.sub(r'^Error creating: (?:pods "[^"]*" is forbidden: )?', "", text)
            if quota := _QUOTA.search(text):
                return f"quota {quota[1]!r} is used up: the pod needs {quota[2]}; used {quota[3]} of {quota[4]}"
            if "violates PodSecurity" in text:
                return f"the namespace's pod security refuses the pods: {text.partition('violates PodSecurity')[2].strip()}"
            return f"Kubernetes creates no pod: {text.rstrip('.')}"
        if event.get("reason") == "SuccessfulCreate":
            return None
    return None


def hopeless(pods: Sequence[Pod]) -> End | None:
    """Return why waiting pods can never start, or None if they can."""
    for waiting in (state_of(pod).get("waiting", {}) for pod in pods):
        reason, text = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _PULLS and _NEVER.search(f"{reason} {text}"):
            hint = "Check the setting image of the compute target."
            return End("engine", f"The image can't be pulled: {_pull_text(text)}. {hint}")
    return None


def service_waits(deployment: Deployment, pods: Sequence[Pod]) -> str:
    """Return why a service waits, such as "1 of 2 pods answer".

    pods: The service's pods with the newest settings.
    """
    answering, count = sum(map(is_ready, pods)), deployment["spec"].get("replicas", 1)
    why = next(filter(None, (_waits(pod) for pod in pods if not is_ready(pod))), None)
    failure = condition_of(deployment, "ReplicaFailure")
    if why is None and failure is not None and len(pods) < count:
        why = refused([{"reason": "FailedCreate", "message": f"Error creating: {failure.get('message')}"}])
    return f"{answering} of {count} pods answer{f', {why}' if why else ''}"


def crashed(pods: Sequence[Pod]) -> End | None:
    """Return how a container of an unfinished pod ended, or None."""
    for pod in pods:
        if is_over(pod) or is_ready(pod) or condition_of(pod, "DisruptionTarget"):
            continue
        before = container_of(pod).get("lastState", {})
        if done := state_of(pod).get("terminated") or before.get("terminated"):
            end = _of_container(pod["metadata"].get("name", "?"), done)
            words = "".join(f"\n  {line}" for line in done.get("message", "").splitlines()[-_LAST_LINES:])
            if end is not None and end.cause == "node_lost" and words:
                return End(end.cause, f"{end.message} Its last lines:{words}")
            return end
    return None


def ended(pod: Pod) -> End | None:
    """Return how a pod ended, or None if it lives or has succeeded."""
    status, name = pod.get("status", {}), pod["metadata"].get("name", "?")
    reason, said = status.get("reason"), first_sentence(status.get("message", ""))
    if disruption := condition_of(pod, "DisruptionTarget"):
        why = _DISRUPTIONS.get(disruption.get("reason", ""), disruption.get("reason", "it was disrupted"))
        return End("preempted", f"Pod {name}: {why} ({first_sentence(disruption.get('message', ''))}).")
    if reason == "Evicted":
        return End("preempted", f"Pod {name} was evicted: {said}.")
    if (done := state_of(pod).get("terminated")) is not None:
        return _of_container(name, done)
    return End("engine", f"Pod {name}: {reason}: {said}.") if status.get("phase") == "Failed" else None


def has_started(pod: Pod) -> bool:
    """Return whether a pod's container runs or has run."""
    return bool(state_of(pod).keys() & {"running", "terminated"} or container_of(pod).get("lastState"))


def ended_at(pod: Pod) -> str:
    """Return the time at which a pod's container ended, or else the pod's creation time."""
    return state_of(pod).get("terminated", {}).get("finishedAt") or pod["metadata"].get("creationTimestamp", "")


def _of_container(name: str, done: ContainerReason) -> End | None:
    code, reason, text = done.get("exitCode", 0), done.get("reason", ""), done.get("message", "")
    complaints = [line[len(COMPLAINT) :] for line in text.splitlines() if line.startswith(COMPLAINT)]
    if complaints:
        return End("engine", f"Pod {name} could not begin: {complaints[-1].rstrip('.')}.")
    if reason == "OOMKilled":
        hint = "raise memory_per_worker of the compute target, or use less."
        return End("memory", f"Pod {name} was killed for memory (OOMKilled): {hint}")
    if "exec format error" in text:
        hint = "set node_selector, such as kubernetes.io/arch=amd64, or another image."
        why = f"The image is for another processor than the node's: {hint}"
        return End("engine", f"Pod {name}: exec format error. {why}")
    if reason in ("StartError", "ContainerCannotRun"):
        missing = "executable file not found" in text or "no such file or directory" in text
        hint = " The image needs Python 3.10 or later; name it by the setting python." if missing else ""
        return End("engine", f"Pod {name} can't start: {first_sentence(text)[-300:]}.{hint}")
    if code in (0, EXIT_AGAIN):
        return None
    return End("node_lost", f"Pod {name} ended with exit code {code} ({reason or 'no reason given'}).")


def is_ready(pod: Pod) -> bool:
    """Return whether a pod answers requests, and Kubernetes is not ending it."""
    return condition_of(pod, "Ready") is not None and not is_over(pod)


def is_over(pod: Pod) -> bool:
    """Return whether a pod has ended, or Kubernetes is ending it."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed") or "deletionTimestamp" in pod["metadata"]


def _waits(pod: Pod) -> str | None:
    unscheduled = condition_of(pod, "PodScheduled", "False")
    if unscheduled is not None:
        pattern = r"^(0/\d+ nodes) are available: (?:\d+ )?Insufficient ([^\s,]+)$"
        why = first_sentence(unscheduled.get("message") or unscheduled.get("reason", ""))
        return re.sub(pattern, r"\1 have enough free \2", why)
    waiting = state_of(pod).get("waiting", {})
    reason, text = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULLS:
        return f"the image can't be pulled: {_pull_text(text or reason)}"
    if reason and reason not in ("ContainerCreating", "PodInitializing"):
        return f"{reason}: {first_sentence(text)}" if text else reason
    return None


def _pull_text(text: str) -> str:
    plain = re.sub(r"Back-off pulling image |rpc error: code = \w+ desc = ", "", " ".join(text.split()))
    return plain[:300].rstrip(".")


def last_digest(pods: Sequence[Pod]) -> str | None:
    """Return the image digest that a pod reports ("python@sha256:..."), or None."""
    digests = (container_of(pod).get("imageID", "") for pod in pods)
    return next((digest for digest in digests if "sha256:" in digest), None)


def running_pod(pods: Sequence[Pod], index: int) -> Pod | None:
    """Return this index's newest pod that runs and is not ending, or None."""
    found = (pod for pod in pods if index_of(pod) == index and "running" in state_of(pod))
    return _newest(pod for pod in found if "deletionTimestamp" not in pod["metadata"])


def ended_pod(pods: Sequence[Pod], index: int) -> Pod | None:
    """Return the newest ended pod with this index, or None."""
    return _newest(pod for pod in pods if index_of(pod) == index and "terminated" in state_of(pod))


def is_complete(job: BatchJob, index: int, *, is_one_of_many: bool) -> bool:
    """Return whether the Job's status says that the run's pod has succeeded."""
    if not is_one_of_many:
        return condition_of(job, "Complete") is not None
    listed = job.get("status", {}).get("completedIndexes", "")
    ranges = (one.partition("-") for one in listed.split(",") if one)
    return any(int(first) <= index <= int(last or first) for first, _, last in ranges)


def _newest(pods: Iterable[Pod]) -> Pod | None:
    return max(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), default=None)
