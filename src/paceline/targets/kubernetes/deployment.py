"""Create, read, replace and delete the objects of a service in the cluster."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.targets.kubernetes import look, manifests, reasons, submission
from paceline.targets.kubernetes.examine import lacking_rights
from paceline.targets.kubernetes.objects import CONTAINER, WORKSPACE_LABEL, Deployment, KubeObject, sendable
from paceline.targets.kubernetes.settings import KubernetesSettings, Manifest

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster

#: The largest number of Secrets for a service's models and source, with 900 KiB each.
_MOST_PARTS = 32
#: The most pods whose logs one program follows, and the seconds before it opens a log again: at first, and at most.
_MOST_LOGS, _AGAIN_S, _SILENT_S = 8, 2.0, 60.0


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """The state of a service's pods in the cluster.

    Attributes:
        exists: Whether the Deployment exists.
        started, ready: Names of pods that have a log, because their container has run, and of pods that answer.
        is_done: Whether all pods have the content of the last change, and answer.
        failure: Why a pod with this content can't answer, or None.
        waiting: How many pods with this content answer, and why the others don't.
    """

    exists: bool
    started: Sequence[str] = ()
    ready: Sequence[str] = ()
    is_done: bool = False
    failure: str | None = None
    waiting: str = ""


class ServiceObjects:
    """The objects of one service: its Deployment, its Service, and Secrets."""

    def __init__(self, cluster: Cluster, settings: KubernetesSettings, name: str, workspace: str) -> None:
        self.cluster, self.workspace = cluster, workspace
        self._settings, self._name = settings, name
        self._selector = f"{manifests.SERVICE_LABEL}={name},{WORKSPACE_LABEL}={workspace}"
        self._deployments, self._pods = (
            look.Watched(cluster, kind, self._selector) for kind in ("deployments", "pods")
        )
        #: Number of the Deployment's last change by this object, which grows with each change.
        self._generation = 0

    def check(self) -> None:
        """Raise TargetError if the user or the cluster can't create the objects."""
        if lacking := [right for right in lacking_rights(self.cluster) if right.endswith("deployments")]:
            raise TargetError(
                f"{self._settings.title}: services need rights that this user lacks in namespace {self.cluster.namespace!r}: "
                f"{', '.join(lacking)}. `paceline compute doctor` prints the Role to ask for."
            )
        self._own("services")
        if self._own("deployments") is None:
            content = manifests.ServiceContent(version="1", ticket={}, package=b"", drain_s=1, start_s=1)
            names = self._names("check", {"library.0": "check"})
            manifest = manifests.deployment_manifest(self._settings, names, content, 1)
            submission.refuse_insecure(self._settings, self.cluster.create("deployments", manifest, dry_run=True)[1])

    def present(self) -> tuple[str, int, Manifest] | None:
        """Return the service's version, number of pods and Deployment; None if missing."""
        if (found := self._own("deployments")) is None:
            return None
        version = found["metadata"].get("annotations", {}).get(manifests.VERSION_ANNOTATION, "")
        return version, found["spec"]["replicas"], sendable(found)

    def put(self, content: manifests.ServiceContent, count: int, note: Callable[[list[str]], None]) -> None:
        """Create the service's objects, or replace its pods by pods with other files.

        note: Called with the names of the service's Secrets before they are created.

        Raises:
            EngineError, TargetError: The cluster does not answer, or refuses an object. The call can be repeated.
        """
        cluster, settings, before = self.cluster, self._settings, self._own("deployments")
        if len(content.package) > _MOST_PARTS * manifests.SECRET_BYTES:
            raise TargetError(
                f"{settings.title}: models and source take {len(content.package) >> 20} MiB packed, and Secrets hold "
                f"{_MOST_PARTS * manifests.SECRET_BYTES >> 20} MiB. Let init() read large files from a volume or a datastore."
            )
        shared = submission.SharedSecrets(cluster, settings, self.workspace)
        count_of_parts = len(manifests.parts_of(content.package))
        files = submission.start_files({**content.ticket, "parts": count_of_parts, "library": shared.library})
        digest = hashlib.sha256(content.package).hexdigest()
        package = f"paceline-package-{self.workspace[:10]}-{digest[:20]}"
        start = f"{self._name}-{hashlib.sha256(files['ticket.json'] + digest.encode()).hexdigest()[:10]}"
        note([start, *(f"{package}-{number}" for number in range(count_of_parts))])
        shared.add(package, lambda: content.package, most=_MOST_PARTS)
        names = self._names(start, shared.names)
        earlier = () if before is None else _shared_by(before)
        manifest = manifests.deployment_manifest(settings, names, content, count, earlier)
        about = (before or cluster.create("deployments", manifest)[0])["metadata"]
        uid, self._generation = about["uid"], about.get("generation", 0)
        cluster.ensure("secrets", manifests.start_manifest(settings, names, uid, files))
        cluster.ensure("services", manifests.in_cluster_manifest(settings, names, uid))
        if before is not None:
            self.replace(manifest)
        shared.restore()

    def replace(self, manifest: Manifest) -> None:
        """Replace the service's Deployment, for example by an earlier version of it."""
        self._generation = self.cluster.replace("deployments", self._name, manifest)["metadata"].get("generation", 0)

    def look(self) -> ServiceState:
        """Return the state of the pods, from watches that this object keeps.

        Raises:
            EngineError, TargetError: The cluster does not answer, or refuses the request.
        """
        found = self._deployments.read().get(self._name) or self._own("deployments")
        if found is None:
            return ServiceState(exists=False)
        pods = [pod for pod in self._pods.read().values() if not reasons.is_over(pod)]
        label = _content_of(found)
        newest = [pod for pod in pods if pod["metadata"].get("labels", {}).get(manifests.CONTENT_LABEL) == label]
        generation, status = found["metadata"].get("generation", 0), found.get("status", {})
        # The watch's copy of the Deployment, and the cluster's controllers, may not have seen the last change yet.
        is_current = self._generation <= generation <= status.get("observedGeneration", 0)
        counts = {status.get("replicas", 0), status.get("updatedReplicas", 0), status.get("availableReplicas", 0)}
        end = (reasons.hopeless(newest) or reasons.crashed(newest)) if is_current else None
        return ServiceState(
            exists=True,
            started=sorted(pod["metadata"]["name"] for pod in pods if reasons.has_started(pod)),
            ready=sorted(pod["metadata"]["name"] for pod in pods if reasons.is_ready(pod)),
            is_done=is_current and counts == {found["spec"]["replicas"]},
            failure=None if end is None else end.message,
            waiting=reasons.service_waits(found, newest),
        )

    def remove_secrets(self, names: Sequence[str]) -> list[str]:
        """Delete these Secrets unless the Deployment uses them. Return the names of kept Secrets."""
        found = self._own("deployments")
        used = set() if found is None else {*_shared_by(found), f"{self._name}-{_content_of(found)}"}
        for name in set(names) - used:
            self.cluster.delete("secrets", name)
        return [name for name in names if name in used]

    def remove(self, names: Sequence[str]) -> bool:
        """Delete the service's objects. Return whether all pods have gone."""
        self._own("deployments")
        self.cluster.delete("deployments", self._name)
        self.remove_secrets(names)
        return not self.cluster.items("pods", only_metadata=True, labelSelector=self._selector)

    def _names(self, job: str, secrets: Mapping[str, str]) -> manifests.ObjectNames:
        run_id = f"service/{self._name}"
        return manifests.ObjectNames(
            job=job, run_id=run_id, workspace=self.workspace, secrets=secrets, service=self._name
        )

    def _own(self, kind: str) -> KubeObject | None:
        """Return the service's object of this kind, or None. Refuse another workspace's object."""
        found = self.cluster.get(kind, self._name)
        if found is None or found["metadata"].get("labels", {}).get(WORKSPACE_LABEL) == self.workspace:
            return found
        raise TargetError(
            f"{self._settings.title}: namespace {self.cluster.namespace!r} has a {kind[:-1]} {self._name!r}, which is not of "
            "this workspace. Choose another name."
        )


def _shared_by(found: Deployment) -> list[str]:
    """Return the names of the Secrets with files that a Deployment's newest pods use."""
    return found["spec"]["template"]["metadata"].get("annotations", {}).get(manifests.SECRETS_ANNOTATION, "").split(",")


def _content_of(found: Deployment) -> str:
    return found["spec"]["template"]["metadata"]["labels"][manifests.CONTENT_LABEL]


class PodLogs:
    """A printer of several pods' logs, with a thread for each."""

    def __init__(self, cluster: Cluster, tell: Callable[[str], None]) -> None:
        self._cluster, self._tell = cluster, tell
        self._pods: set[str] = set()

    def follow(self, pods: Sequence[str]) -> None:
        """Print the logs of these pods, and do not reconnect to other pods' logs."""
        new, self._pods = set(pods[:_MOST_LOGS]) - self._pods, set(pods[:_MOST_LOGS])
        for pod in new:
            threading.Thread(target=self._print, args=(pod,), name="pod-log", daemon=True).start()

    def _print(self, pod: str) -> None:
        last, pause_s = "", _AGAIN_S
        while pod in self._pods:
            try:
                for stamp, text in self._cluster.follow_log(pod, CONTAINER, last):
                    last, pause_s = stamp, _AGAIN_S
                    self._tell(f"{pod}: {text}")
            except (EngineError, TargetError):
                pass  # the container starts again, or the connection broke
            again_s, pause_s = time.monotonic() + pause_s, min(2 * pause_s, _SILENT_S)
            while pod in self._pods and time.monotonic() < again_s:
                time.sleep(_AGAIN_S)
