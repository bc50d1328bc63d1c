"""Create, read, replace and delete the objects of a service in the cluster."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import paceline
from paceline.errors import EngineError, TargetError
from paceline.remote.foreign_python import library_digest
from paceline.targets.kubernetes import boot, manifests, reasons, submission
from paceline.targets.kubernetes.examine import lacking_rights
from paceline.targets.kubernetes.manifests import CONTAINER, SECRETS_ANNOTATION, WORKSPACE_LABEL, ObjectNames
from paceline.targets.kubernetes.objects import Deployment, Pod
from paceline.targets.kubernetes.settings import Json, KubernetesSettings, Manifest
from paceline.targets.kubernetes.ticket import message
from paceline.targets.kubernetes.watch import Watched

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster

#: The largest number of Secrets for a service's models and source, with 900 KiB each.
_MOST_PARTS = 32
#: The most pods whose logs one program follows, and the seconds before it opens a log again.
_MOST_LOGS, _AGAIN_S = 8, 2.0


@dataclass(frozen=True, kw_only=True)
class ServiceContent:
    """The content of a service's pods.

    Attributes:
        version: Text that identifies the content, such as the revision's number.
        ticket: JSON object with the name of the pods' program, a module of Paceline, and with values for this program.
        package: Archive with the models and the source, which the program unpacks.
        drain_s, start_s: Seconds that a pod has for its open requests at its end, and from its start to its first answer.
    """

    version: str
    ticket: Mapping[str, object]
    package: bytes
    drain_s: float
    start_s: float


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """The state of a service's pods in the cluster.

    Attributes:
        exists: Whether the Deployment exists.
        pods, ready: Names of all pods that Kubernetes is not ending, and of those that answer.
        is_done: Whether all pods have the content of the last change, and answer.
        failure: Why a pod with this content can't answer, or None.
        waiting: How many pods with this content answer, and why the others don't.
    """

    exists: bool
    pods: Sequence[str] = ()
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
        self._deployments, self._pods = (Watched(cluster, kind, self._selector) for kind in ("deployments", "pods"))
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
        if self._deployment() is None:
            manifest = manifests.deployment_manifest(
                self._settings, self._names("check", {"library.0": "check"}), "1", 1, drain_s=1, start_s=1
            )
            submission.refuse_insecure(self._settings, self.cluster.create("deployments", manifest, dry_run=True)[1])

    def present(self) -> tuple[str, int, Manifest] | None:
        """Return the pods' version, their number, and the Deployment for `replace`; None without a Deployment."""
        if (found := self._deployment()) is None:
            return None
        version = found["metadata"].get("annotations", {}).get(manifests.VERSION_ANNOTATION, "")
        return version, found["spec"]["replicas"], _stripped(cast("Manifest", found))

    def put(self, content: ServiceContent, count: int, note: Callable[[list[str]], None]) -> None:
        """Create the objects, or replace the pods by pods with other content.

        note: Called with the names of the service's Secrets before they are created.

        Raises:
            EngineError, TargetError: The cluster does not answer, or refuses an object. The call can be repeated.
        """
        cluster, settings, before = self.cluster, self._settings, self._deployment()
        library, parts = Path(paceline.__file__).resolve().parents[1], manifests.parts_of(content.package)
        if len(parts) > _MOST_PARTS:
            raise TargetError(
                f"{settings.title}: models and source take {len(content.package) >> 20} MiB packed, and Secrets hold "
                f"{_MOST_PARTS * manifests.SECRET_BYTES >> 20} MiB. Let init() read large files from a volume or a datastore."
            )
        ticket = message({**content.ticket, "parts": len(parts), "library": library_digest(library)})
        digest = hashlib.sha256(content.package).hexdigest()
        package = f"paceline-package-{self.workspace[:10]}-{digest[:20]}"
        start = f"{self._name}-{hashlib.sha256(ticket + digest.encode()).hexdigest()[:10]}"
        note([start, *(f"{package}-{number}" for number in range(len(parts)))])

        def stored(*, anew: bool) -> dict[str, str]:
            where = (cluster, settings, package, self.workspace)
            found = submission.content_secrets(*where, lambda: content.package, most=_MOST_PARTS, anew=anew) or {}
            return found | submission.library_secrets(cluster, settings, library, self.workspace, anew=anew)

        names = self._names(start, stored(anew=False))
        earlier = () if before is None else _shared_by(before)
        limits = {"drain_s": content.drain_s, "start_s": content.start_s}
        manifest = manifests.deployment_manifest(settings, names, content.version, count, earlier=earlier, **limits)
        created = cluster.create("deployments", manifest)[0] if before is None else before
        uid = cast("Deployment", created)["metadata"]["uid"]
        files = {"boot.py": Path(boot.__file__).read_bytes(), "ticket.json": ticket}
        cluster.ensure("secrets", manifests.start_manifest(settings, names, uid, files))
        cluster.ensure("services", manifests.in_cluster_manifest(settings, names, uid))
        if before is not None:
            self.replace(manifest)
        # `prune` may have deleted a shared Secret before the Deployment named it.
        if any(cluster.annotations("secrets", name) is None for name in names.secrets.values()):
            stored(anew=True)

    def replace(self, manifest: Manifest) -> None:
        """Replace the Deployment, for example by an earlier one, whose pods then continue."""
        changed = cast("Deployment", self.cluster.replace("deployments", self._name, manifest))
        self._generation = changed["metadata"].get("generation", 0)

    def look(self) -> ServiceState:
        """Return the state of the pods, from watches that this object keeps.

        Raises:
            EngineError, TargetError: The cluster does not answer, or refuses the request.
        """
        found = cast("Deployment | None", self._deployments.read().get(self._name)) or self._deployment()
        if found is None:
            return ServiceState(exists=False)
        pods = [pod for pod in cast("list[Pod]", list(self._pods.read().values())) if not reasons.is_over(pod)]
        label = _content_of(found)
        newest = [pod for pod in pods if pod["metadata"].get("labels", {}).get(manifests.CONTENT_LABEL) == label]
        generation, status = found["metadata"].get("generation", 0), found.get("status", {})
        # The copy of the watch, and the cluster's controllers, may not have seen the last change yet.
        is_current = self._generation <= generation <= status.get("observedGeneration", 0)
        counts = {status.get("replicas", 0), status.get("updatedReplicas", 0), status.get("availableReplicas", 0)}
        end = (reasons.hopeless(newest) or reasons.crashed(newest)) if is_current else None
        return ServiceState(
            exists=True,
            pods=sorted(pod["metadata"]["name"] for pod in pods),
            ready=sorted(pod["metadata"]["name"] for pod in pods if reasons.is_ready(pod)),
            is_done=is_current and counts == {found["spec"]["replicas"]},
            failure=None if end is None else end.message,
            waiting=reasons.service_waits(found, newest),
        )

    def remove_secrets(self, names: Sequence[str]) -> list[str]:
        """Delete Secrets that the Deployment does not use. Return the others."""
        found = self._deployment()
        used = set() if found is None else {*_shared_by(found), f"{self._name}-{_content_of(found)}"}
        for name in set(names) - used:
            self.cluster.delete("secrets", name)
        return [name for name in names if name in used]

    def remove(self, names: Sequence[str]) -> bool:
        """Delete the service's objects. Return whether all pods have gone."""
        if self._deployment() is not None:
            self.cluster.delete("deployments", self._name)
        self.remove_secrets(names)
        return not self.cluster.items("pods", only_metadata=True, labelSelector=self._selector)

    def _names(self, job: str, secrets: Mapping[str, str]) -> ObjectNames:
        run_id = f"service/{self._name}"
        return ObjectNames(job=job, run_id=run_id, workspace=self.workspace, secrets=secrets, service=self._name)

    def _deployment(self) -> Deployment | None:
        return cast("Deployment | None", self._own("deployments"))

    def _own(self, kind: str) -> Json:
        """Return the service's object, or None. Raise TargetError if another workspace owns it."""
        found = self.cluster.get(kind, self._name)
        labels = {} if found is None else cast("Deployment", found)["metadata"].get("labels", {})
        if found is None or labels.get(WORKSPACE_LABEL) == self.workspace:
            return found
        raise TargetError(
            f"{self._settings.title}: namespace {self.cluster.namespace!r} has a {kind[:-1]} {self._name!r}, which is not of "
            "this workspace. Choose another name."
        )


def _stripped(found: Manifest) -> Manifest:
    """Return a Deployment without the fields that the API sets."""
    about = cast("Manifest", found["metadata"])
    kept: Manifest = {key: about[key] for key in ("name", "labels", "annotations") if key in about}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": kept, "spec": found["spec"]}


def _shared_by(found: Deployment) -> list[str]:
    """Return the names of the content Secrets that a Deployment's newest pods use."""
    return found["spec"]["template"]["metadata"].get("annotations", {}).get(SECRETS_ANNOTATION, "").split(",")


def _content_of(found: Deployment) -> str:
    return found["spec"]["template"]["metadata"]["labels"][manifests.CONTENT_LABEL]


class PodLogs:
    """A printer of several pods' logs, with a thread for each."""

    def __init__(self, cluster: Cluster, tell: Callable[[str], None]) -> None:
        self._cluster, self._tell = cluster, tell
        self._pods: set[str] = set()

    def follow(self, pods: Sequence[str]) -> None:
        """Print the logs of these pods, and open no further logs of others."""
        new, self._pods = set(pods[:_MOST_LOGS]) - self._pods, set(pods[:_MOST_LOGS])
        for pod in new:
            threading.Thread(target=self._print, args=(pod,), name="pod-log", daemon=True).start()

    def _print(self, pod: str) -> None:
        last = ""
        while pod in self._pods:
            try:
                for stamp, text in self._cluster.follow_log(pod, CONTAINER, last):
                    last = stamp
                    self._tell(f"{pod}: {text}")
            except (EngineError, TargetError):
                pass  # the container has not started, or the connection broke
            time.sleep(_AGAIN_S)
