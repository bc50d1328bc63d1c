"""The parts of the Kubernetes API's objects that Paceline reads."""

from __future__ import annotations

from typing import TypedDict


class ObjectMeta(TypedDict, total=False):
    """The metadata of a Kubernetes object, such as its name and labels."""

    name: str
    uid: str
    resourceVersion: str
    generation: int
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


class ContainerReason(TypedDict, total=False):
    """The reason why a container has not started, or how it ended."""

    exitCode: int
    reason: str
    message: str


class ContainerState(TypedDict, total=False):
    """The state of a container: running, waiting or terminated, with the reason."""

    waiting: ContainerReason
    running: dict[str, str]
    terminated: ContainerReason


class ContainerStatus(TypedDict, total=False):
    """The status of a container. `lastState` is its end before its last restart."""

    name: str
    state: ContainerState
    lastState: ContainerState
    imageID: str


class PodStatus(TypedDict, total=False):
    """The status of a pod."""

    phase: str
    reason: str
    message: str
    conditions: list[PodCondition]
    containerStatuses: list[ContainerStatus]


class Pod(TypedDict, total=False):
    """A pod, as the API describes it."""

    metadata: ObjectMeta
    status: PodStatus


class BatchJobSpec(TypedDict, total=False):
    """The specification of a Job: its size, and whether it is suspended."""

    completions: int
    parallelism: int
    suspend: bool


class BatchJobStatus(TypedDict, total=False):
    """The status of a Job. `completedIndexes` is a text such as "0,2-5"."""

    conditions: list[PodCondition]
    completedIndexes: str


class BatchJob(TypedDict, total=False):
    """A Job of the API group `batch`."""

    metadata: ObjectMeta
    spec: BatchJobSpec
    status: BatchJobStatus


class DeploymentSpec(TypedDict, total=False):
    """The specification of a Deployment: its number of pods, and their template."""

    replicas: int
    template: Pod


class DeploymentStatus(TypedDict, total=False):
    """The status of a Deployment, with its numbers of pods."""

    observedGeneration: int
    replicas: int
    updatedReplicas: int
    availableReplicas: int
    conditions: list[PodCondition]


class Deployment(TypedDict, total=False):
    """A Deployment of the API group `apps`."""

    metadata: ObjectMeta
    spec: DeploymentSpec
    status: DeploymentStatus


class ClusterEvent(TypedDict, total=False):
    """An event of the cluster about an object, such as FailedScheduling."""

    type: str
    reason: str
    message: str
    lastTimestamp: str
    eventTime: str


def index_of(pod: Pod) -> int:
    """Return a pod's number in its Indexed Job, from 0."""
    annotations = pod["metadata"].get("annotations", {})
    return int(annotations.get("batch.kubernetes.io/job-completion-index", "-1"))


def container_of(pod: Pod, name: str) -> ContainerState:
    """Return a container's state by name; {} before the kubelet has reported it."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        if status.get("name") == name:
            return status.get("state", {})
    return {}


def condition_of(conditions: list[PodCondition], kind: str, status: str = "True") -> PodCondition | None:
    """Return the condition with this type and status, or None."""
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == status), None)
