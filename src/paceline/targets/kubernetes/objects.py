"""The parts of the Kubernetes API's objects that Paceline reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypedDict

#: In each pod, the name of the container that runs the workers.
CONTAINER = "paceline"
#: The label that marks the objects of a workspace.
WORKSPACE_LABEL = "paceline/workspace"


class ObjectMeta(TypedDict, total=False):
    """The metadata of a Kubernetes object, such as its name and labels."""

    name: str
    uid: str
    resourceVersion: str
    generation: int
    labels: dict[str, str]
    annotations: dict[str, str]
    ownerReferences: list[ObjectMeta]
    creationTimestamp: str
    deletionTimestamp: str


class ObjectCondition(TypedDict, total=False):
    """A condition of a pod, a Job, a Deployment or a Workload."""

    type: str
    status: str
    reason: str
    message: str


class ContainerReason(TypedDict, total=False):
    """The reason why a container has not started, or how it ended."""

    exitCode: int
    finishedAt: str
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


class Spec(TypedDict, total=False):
    """The specification of a Job, a Deployment, or a volume claim (`accessModes`)."""

    completions: int
    parallelism: int
    suspend: bool
    replicas: int
    template: KubeObject
    accessModes: list[str]


class ObjectStatus(TypedDict, total=False):
    """The status of a pod, Job or Deployment. `completedIndexes` is text such as "0,2-5"."""

    phase: str
    reason: str
    message: str
    conditions: list[ObjectCondition]
    containerStatuses: list[ContainerStatus]
    completedIndexes: str
    observedGeneration: int
    replicas: int
    updatedReplicas: int
    availableReplicas: int


class KubeObject(TypedDict, total=False):
    """A Kubernetes object. Events have a reason and messages instead of a status."""

    metadata: ObjectMeta
    spec: Spec
    status: ObjectStatus
    reason: str
    message: str
    lastTimestamp: str
    eventTime: str


Pod: TypeAlias = KubeObject
BatchJob: TypeAlias = KubeObject
Deployment: TypeAlias = KubeObject
ClusterEvent: TypeAlias = KubeObject


def index_of(pod: Pod) -> int:
    """Return a pod's number in its Indexed Job, from 0."""
    annotations = pod["metadata"].get("annotations", {})
    return int(annotations.get("batch.kubernetes.io/job-completion-index", "-1"))


def container_of(pod: Pod) -> ContainerStatus:
    """Return the status of the workers' container; {} before the kubelet reports it."""
    listed = pod.get("status", {}).get("containerStatuses", [])
    return next((one for one in listed if one.get("name") == CONTAINER), ContainerStatus())


def state_of(pod: Pod) -> ContainerState:
    """Return the state of the workers' container; {} before the kubelet reports it."""
    return container_of(pod).get("state", {})


def condition_of(found: KubeObject, kind: str, status: str = "True") -> ObjectCondition | None:
    """Return an object's condition with this type and status, or None."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == status), None)


def sendable(found: KubeObject) -> dict[str, Any]:
    """Return a Kubernetes object without the values that the API adds."""
    about: Mapping[str, Any] = found["metadata"]
    kept = {key: about[key] for key in ("name", "labels", "annotations") if key in about}
    return {**{key: value for key, value in found.items() if key != "status"}, "metadata": kept}
