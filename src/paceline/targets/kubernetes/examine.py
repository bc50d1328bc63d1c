"""Query a user's rights and a cluster's nodes; link to pods for the doctor."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.remote.link import Link
from paceline.remote.link.bootstrap import Ends
from paceline.targets.kubernetes import allocate, manifests, readers, reasons, submission
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster
from paceline.targets.kubernetes.objects import state_of
from paceline.targets.kubernetes.settings import KubernetesSettings, bytes_of
from paceline.targets.kubernetes.ticket import PodTicket
from paceline.targets.status import NodeStatus, Status

#: Rights that the user's Role needs: (API group, resources, verbs). `_OPTIONAL` ones are needed only by a part of Paceline.
RULES = (
    ("batch", ("jobs",), ("create", "get", "list", "watch", "delete")),
    ("", ("pods", "pods/log", "events"), ("get", "list", "watch")),
    ("", ("secrets", "services"), ("create", "get", "delete")),
    ("", ("pods/portforward",), ("get", "create")),
    ("apps", ("deployments",), ("create", "get", "list", "watch", "update", "delete")),
)
#: Resource of an optional right -> the loss without it.
_OPTIONAL = {
    "pods/portforward": "without the right to forward ports (pods/portforward), logs come from the pod's log",
    "deployments": "without all rights on deployments, there are no services",
}
_PLACE_S, _PAUSE_S, _LINK_S = 60.0, 0.3, 30.0


def missing_rights(granted: Sequence[Mapping[str, list[str]]]) -> list[str]:
    """Return Paceline's rights (`RULES`) that a SelfSubjectRulesReview does not grant."""
    rules = [rule for rule in granted if not rule.get("resourceNames")]

    def has(group: str, resource: str, verb: str) -> bool:
        wanted = (("apiGroups", group), ("resources", resource), ("verbs", verb))
        return any(all({value, "*"} & {*(rule.get(key) or ())} for key, value in wanted) for rule in rules)

    rights = [(group, resource, verb) for group, resources, verbs in RULES for resource in resources for verb in verbs]
    return [f"{verb} {resource}" for group, resource, verb in rights if not has(group, resource, verb)]


def role_text(namespace: str) -> str:
    """Return a Role with Paceline's rights as YAML, for a cluster's administrator."""
    head = f"kind: Role\nmetadata: {{name: paceline, namespace: {namespace}}}\nrules:"
    rules = (
        f'- {{apiGroups: ["{group}"], resources: [{", ".join(resources)}], verbs: [{", ".join(verbs)}]}}'
        for group, resources, verbs in RULES
    )
    return "\n".join(["apiVersion: rbac.authorization.k8s.io/v1", head, *rules])


def lacking_rights(cluster: Cluster) -> list[str]:
    """Return Paceline's rights (`RULES`) that this user lacks, such as "create jobs"."""
    review = cluster.review("SelfSubjectRulesReview", {"namespace": cluster.namespace})
    missing = missing_rights(review["resourceRules"])
    # With a webhook authorizer, as in managed clouds, the review is incomplete. Then ask for each right.
    return [right for right in missing if not (review.get("incomplete") and cluster.may(*right.split(" ")))]


def status_of(cluster: Cluster) -> Status:
    """Return the nodes' status, or one entry for the namespace if listing nodes is forbidden.

    Raises:
        TargetError: The user lacks rights; the message has these rights, and the Role to ask for.
    """
    missing = lacking_rights(cluster)
    if lacking := [right for right in missing if right.partition(" ")[2] not in _OPTIONAL]:
        raise TargetError(
            f"{cluster.title}: this user may not {', '.join(lacking)} in namespace {cluster.namespace!r}. Ask an administrator "
            f"for this Role:\n\n{role_text(cluster.namespace)}\n"
        )
    lost = [loss for what, loss in _OPTIONAL.items() if any(right.endswith(f" {what}") for right in missing)]
    said = "; ".join([f"Kubernetes {cluster.version()} at {cluster.server}", *lost])
    return Status(nodes=tuple(_nodes(cluster)), message=said)


def _nodes(cluster: Cluster) -> Iterator[NodeStatus]:
    try:
        listed = cluster.request("GET", "/api/v1/nodes", {"limit": "500"}).json()["items"]
    except ApiRefusedError:
        yield NodeStatus(name=f"namespace {cluster.namespace}", message="this user may not list the cluster's nodes")
        return
    for node in listed:
        room, conditions = node["status"].get("allocatable", {}), node["status"].get("conditions", [])
        gpus = sum(int(amount) for name, amount in room.items() if name.endswith("/gpu"))
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        is_open = not node["spec"].get("unschedulable")
        yield NodeStatus(
            name=node["metadata"]["name"],
            cores=int(bytes_of(str(room.get("cpu", "0")), "cpu")),
            gpus=gpus,
            is_up=is_ready and is_open,
            state={(True, True): "ready", (True, False): "cordoned"}.get((is_ready, is_open), "not ready"),
        )


@contextlib.contextmanager
def examined(cluster: Cluster, settings: KubernetesSettings, count: int, workspace: str) -> Iterator[list[Link]]:
    """Start a Job of `count` pods. Yield a link to each pod.

    Raises:
        EngineError: The pods do not start, or can't be reached.
        ApiRefusedError: The user may not forward ports.
    """
    run_id = f"doctor_0_{secrets.token_hex(4)}"
    code = submission.SharedSecrets(cluster, settings, workspace)
    names = manifests.ObjectNames(
        job=manifests.job_name(run_id), run_id=run_id, workspace=workspace, secrets=code.names
    )
    port, key = manifests.port_of(run_id), secrets.token_hex(32)
    ticket = PodTicket(run_id="", job=names.job, port=port, key=key, library=code.library, node_count=count)
    job = Job(entry_script="doctor.py", node_count=count, distributed_backend="gloo" if count > 1 else None)
    links: list[Link] = []
    try:
        submission.create(cluster, job, settings, names, {}, ticket)
        for pod in _started(cluster, names.job, count):
            with cluster.patiently(functools.partial(readers.connect, cluster, pod, port, key), _LINK_S) as connection:
                fd = os.dup(connection.fileno())
            links.append(allocate.open_link(Ends(fd, fd), pod, submission.LIBRARY, settings.silence_s))
        for link in links:
            # Routes connect the pods' subnets. So use prefix length 0, which makes all pods members of one network.
            routed = {name: (address, 0) for name, (address, _) in link.hello.interfaces.items()}
            link.hello = replace(link.hello, interfaces=routed)
        yield links
    finally:
        for link in links:
            link.close()
        with contextlib.suppress(TargetError, EngineError):
            cluster.delete("jobs", names.job)


def _started(cluster: Cluster, name: str, count: int) -> list[str]:
    deadline = time.monotonic() + _PLACE_S
    while True:
        pods = cluster.items("pods", labelSelector=f"batch.kubernetes.io/job-name={name}")
        found = sorted(pod["metadata"]["name"] for pod in pods if "running" in state_of(pod))
        if len(found) >= count:
            return found
        for pod in pods:
            if (end := reasons.ended(pod)) is not None:
                raise EngineError(f"{cluster.title}: {end.message}")
        if (end := reasons.hopeless(pods)) is not None or time.monotonic() > deadline:
            why = end.message if end is not None else reasons.waits_for(cluster.get("jobs", name) or {}, pods, [])
            raise EngineError(f"{cluster.title}: the doctor's pods do not start within {_PLACE_S:g} s: {why}.")
        time.sleep(_PAUSE_S)
