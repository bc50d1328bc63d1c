"""The parts of the Kubernetes API's objects that Paceline reads."""

from __future__ import annotations

from typing import TypedDict


class ObjectMeta(TypedDict, total=False):
    """The metadata of an object."""

    name: str
    uid: str
    labels: dict[str, str]
    annotations: dict[str, str]
    creationTimestamp: str
    deletionTimestamp: str


class PodCondition(TypedDict, total=False):
    """A condition of a pod, a Job or a Workload."""

    type: str
    status: str
    reason: str
    message: str
    lastTransitionTime: str


class ContainerWait(TypedDict, total=False):
    """The reason why a container has not started."""

    reason: str
    message: str


class ContainerEnd(TypedDict, total=False):
    """The end of a container."""

    exitCode: int
    signal: int
    reason: str
    message: str
    finishedAt: str


class ContainerState(TypedDict, total=False):
    """The state of a container, under one of these keys."""

    waiting: ContainerWait
    running: dict[str, str]
    terminated: ContainerEnd


class ContainerStatus(TypedDict, total=False):
    """The status of a container. `imageID` has the digest of the image."""

    name: str
    state: ContainerState
    imageID: str


class PodStatus(TypedDict, total=False):
    """The status of a pod."""

    phase: str
    reason: str
    message: str
    startTime: str
    conditions: list[PodCondition]
    containerStatuses: list[ContainerStatus]
    initContainerStatuses: list[ContainerStatus]


class PodSpec(TypedDict, total=False):
    """The node of a pod."""

    nodeName: str


class Pod(TypedDict, total=False):
    """A pod."""

    metadata: ObjectMeta
    spec: PodSpec
    status: PodStatus


class BatchJobSpec(TypedDict, total=False):
    """The size of a Job, and whether it is suspended."""

    completions: int
    suspend: bool


class BatchJobStatus(TypedDict, total=False):
    """The status of a Job."""

    conditions: list[PodCondition]
    active: int
    ready: int


class BatchJob(TypedDict, total=False):
    """A Job of the API group `batch`."""

    metadata: ObjectMeta
    spec: BatchJobSpec
    status: BatchJobStatus


class ClusterEvent(TypedDict, total=False):
    """An event about an object."""

    type: str
    reason: str
    message: str
    lastTimestamp: str
    eventTime: str


def index_of(pod: Pod) -> int:
    """Return the completion index of a pod of an Indexed Job."""
    annotations = pod["metadata"].get("annotations", {})
    return int(annotations.get("batch.kubernetes.io/job-completion-index", "-1"))


def container_of(pod: Pod, name: str) -> ContainerState:
    """Return the state of a container of this name; {} before the kubelet has reported it."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        if status.get("name") == name:
            return status.get("state", {})
    return {}


def condition_of(conditions: list[PodCondition], kind: str, status: str = "True") -> PodCondition | None:
    """Return the condition of this type with this status, or None."""
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == status), None)
