"""The compute target `kubernetes`, used before a run and inside its pod."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, preview_ports
from paceline.remote.staging.stage_out_local import has_all, is_over, settle
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, login_name
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, JobStatus, engine, is_copy, note_engine
from paceline.system import locks
from paceline.system.files import read_json
from paceline.targets.base import Nodes, Preview, Waiting
from paceline.targets.kubernetes import look, manifests, many, readers
from paceline.targets.kubernetes.settings import OPTIONS, read_settings
from paceline.targets.kubernetes.ticket import TICKET_VARIABLE, Noted
from paceline.targets.options import Option, SettingValues
from paceline.targets.polling import answers_dir, keep, kept

if TYPE_CHECKING:
    from paceline.remote.link import Link
    from paceline.remote.link.copies import LeftBehind
    from paceline.runs.remote_status import Channel
    from paceline.targets.kubernetes.allocate import PodGathering
    from paceline.targets.kubernetes.api import Cluster
    from paceline.targets.kubernetes.deployment import ServiceObjects
    from paceline.targets.status import Status

#: Seconds for which requests to an unreachable API server are repeated: during a submission, and during the checks before it.
_PATIENCE_S, _CHECK_S = 120.0, 20.0
#: Seconds for which Paceline reuses the API's answer to the question whether the user may forward ports.
_RIGHTS_S = 3600.0
#: Seconds after which a run that still has no Job counts as never submitted.
_SUBMIT_S = 180.0


class KubernetesTarget:
    """A namespace of a Kubernetes cluster as a compute target, for one run."""

    kind: ClassVar[str] = "kubernetes"
    OPTIONS: ClassVar[tuple[Option, ...]] = OPTIONS

    def __init__(self, name: str = "kubernetes", settings: SettingValues | None = None) -> None:
        self.name = name
        # `paceline compute add` stores `self.settings`. Without a context from the user, it has the kubeconfig's current context.
        self.settings, self._checked = read_settings(name, settings or {})
        self._gathering: PodGathering | None = None

    # --- methods that the submitting program calls

    def check(self, job: Job) -> None:
        from paceline.targets.kubernetes.submission import refuse_insecure

        settings = self._checked
        if job.environment.docker_image:
            raise TargetError(
                f"{settings.title}: the pods are containers already, and start none. Leave docker_image out, and set image of "
                f"the compute target to {job.environment.docker_image!r}."
            )
        job_name = manifests.job_name("check_0_00000000")
        names = manifests.ObjectNames(job=job_name, run_id="check", workspace="check", secrets={"library.0": "check"})
        manifest, cluster = manifests.job_manifest(job, settings, names), self._cluster()
        if settings.volume:
            self._check_volume(cluster, settings.volume, job.node_count)
        _, warnings = cluster.patiently(lambda: cluster.create("jobs", manifest, dry_run=True), _CHECK_S)
        refuse_insecure(settings, warnings)

    def preview(self, job: Job) -> Preview:
        cores = max(1, int(self._checked.cpus_per_worker * job.process_count_per_node))
        gpus = tuple(map(str, range(self._checked.gpus_per_worker * job.process_count_per_node))) if job.use_gpu else ()
        nodes = tuple(
            Node(node_rank=rank, name=f"{self.name}-{rank}", address=f"{self.name}-{rank}", cores=cores, gpus=gpus)
            for rank in range(job.node_count)
        )
        return Preview(nodes=nodes, ports=preview_ports(job))

    def script(self, job: Job) -> str:
        """Return a run's manifests for --dry-run, with placeholders in capitals."""
        import yaml

        from paceline.targets.kubernetes.submission import preview

        return str(yaml.safe_dump_all(preview(job, self._checked), sort_keys=False))

    def enqueue(self, job: Job, run_dir: Path) -> None:
        self._job = job
        note_engine(RunFolder(run_dir), self.kind, submitting=time.time(), mirrored=True)

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        """Create the run's Job by `start_supervisors`. Return 0."""
        self.start_supervisors(self._job, [run_dir], library_dir, python, 1)
        return 0

    def check_alike(self, job: Job) -> None:
        if job.node_count > 1:
            raise TargetError(
                f"{self._checked.title}: one Kubernetes Job holds many runs of one pod each, and this job has {job.node_count} "
                "nodes. Submit the runs one by one: a sweep without array_size, a function by submit()."
            )

    def start_supervisors(
        self, job: Job, run_dirs: Sequence[Path], library_dir: Path, python: str, at_once: int
    ) -> None:
        """Create one Job for similar runs, each with one pod.

        Raises:
            EngineError, TargetError: The cluster does not answer for minutes, or refuses an object.
        """
        from paceline.targets.kubernetes.submission import start_upload, submit

        if len(run_dirs) > 1:
            self.check_alike(job)
        folders, cluster, workspace_dir = [RunFolder(one) for one in run_dirs], self._cluster(), run_dirs[0].parents[1]
        forwards, workspace = self._may_forward(cluster, workspace_dir), _workspace(workspace_dir)
        # Record the Job before creating it, so that `release` can delete it after a lost answer. Record the workspace label too,
        # because its value depends on this host's name.
        told = {"server": cluster.server, "forwards": forwards, "workspace": workspace, "submitting": time.time()}
        told |= {"job_id": manifests.many_name([folder.run_id for folder in folders]), "mirrored": True}
        for index, folder in enumerate(folders):
            one_of_many = {"index": index, "count": len(folders)} if len(folders) > 1 else {}
            note_engine(folder, self.kind, **told, **one_of_many)
        sent = cluster.patiently(
            lambda: submit(cluster, job, self._checked, folders, workspace, live=not forwards, at_once=at_once),
            _PATIENCE_S,
            lambda text: print(text, file=sys.stderr),
        )
        for folder in folders:
            note_engine(folder, self.kind, submitted=time.time(), **sent)
            if folder.cancel_request.exists():  # `cancel` found no Job, because this submission had not created it
                self.cancel(folder, store.stored(folder))
        if sent["upload"]:
            start_upload(run_dirs[0], library_dir, python)

    def release(self, run_dir: Path) -> None:
        """Delete the Job of a failed submission."""
        noted = _noted(RunFolder(run_dir))
        if TICKET_VARIABLE not in os.environ and noted.get("job_id") and not noted.get("index"):
            with contextlib.suppress(TargetError, EngineError):
                self._remove(RunFolder(run_dir), noted, submitted=False)

    # --- methods for programs on a user's machine that query, cancel or enter a submitted run

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        if settle(folder):
            return JobStatus(state=RUNNING)
        noted = _noted(folder)
        if not noted.get("submitted"):
            return self._look_unsubmitted(folder, noted)
        cluster = self._cluster()
        if noted.get("server") != cluster.server:
            raise EngineError(
                f"{self._checked.title}: context {self._checked.context!r} now names the cluster at {cluster.server}, and run "
                f"{folder.run_id} is on {noted.get('server')}. Restore the context, or cancel the run with --force."
            )
        if noted.get("gone"):
            found = JobStatus(state=GONE, **noted["gone"])
        else:
            found = look.look(cluster, folder, noted)
            dropped = many.dropped(folder)
            if many.is_many(noted) and (found.state == GONE or dropped is not None) and not noted.get("dropped"):
                # Cancel a run that is over (GONE) in the Job. Otherwise Kubernetes may restart the run's pod.
                many.drop(cluster, self._checked, folder, noted, dropped or {})
            if found.state == GONE:
                # Record why the run is over, because later calls of `look` find no Job.
                gone = {"cause": found.cause, "message": found.message, "by": found.by}
                note_engine(folder, self.kind, gone=gone)
        if (has_all(folder) or found.state == GONE) and not noted.get("removed"):
            look.explain(folder, engine(folder))
            self._remove(folder, noted)
            note_engine(folder, self.kind, removed=True)
            settle(folder)
        return found

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        noted = _noted(folder)
        if is_over(folder) or not noted.get("job_id"):
            return
        cluster = self._cluster()
        request = read_json(folder.cancel_request) or {}
        if look.cancel_in_pod(cluster, folder, noted, request):
            return
        if many.is_many(noted):
            many.drop(cluster, self._checked, folder, noted, request)
        else:
            # The pods have not begun, or can't be reached. Deleting the Job ends the pods after their grace period.
            self._remove(folder, noted)

    def channel(self, folder: RunFolder) -> Channel | None:
        """Return the channel of `paceline exec` to a pod; None inside the pod."""
        if not is_copy(folder):
            return None
        connection = look.connected(self._cluster(), folder, _noted(folder))
        if connection is None:
            raise EngineError(f"run {folder.run_id} has no pod that runs at the moment. `paceline status` says why.")
        return readers.PodChannel(connection)

    # --- methods that describe the cluster for users

    def status(self) -> Status:
        """Return the status of the cluster's nodes, after checking this user's rights.

        Raises:
            TargetError: The user lacks a right. The message has a Role that grants it.
        """
        from paceline.targets.kubernetes.examine import status_of

        return status_of(self._cluster())

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Link]]:
        """Start `node_count` pods (default: two) to check them. Yield connections to their agents."""
        from paceline.targets.kubernetes.examine import examined

        with examined(self._cluster(), self._checked, node_count or 2, "doctor") as links:
            yield links

    def clear(self, runs_dir: Path, *, dry_run: bool = False) -> Iterator[LeftBehind]:
        """Yield unneeded Secrets and ended runs' Jobs, removing each unless `dry_run`."""
        from paceline.targets.kubernetes.leftovers import clear

        return clear(self._cluster(), _workspace(runs_dir.parent), runs_dir, dry_run=dry_run)

    def service(self, name: str, workspace_dir: Path, label: str = "") -> ServiceObjects:
        """Return the Kubernetes objects of the workspace's service `name`.

        label: The workspace's label on the objects, if it was computed before a change of this host's name; "" computes it now.
        """
        cluster = self._cluster()
        from paceline.targets.kubernetes.deployment import ServiceObjects

        return ServiceObjects(cluster, self._checked, name, label or _workspace(workspace_dir))

    # --- methods that the supervisor calls in the pod of index 0

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        from paceline.targets.kubernetes.allocate import PodGathering, gather, ticket

        if self._gathering is None:
            self._gathering = PodGathering(ticket())
        library = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
        return gather(self._gathering, job, self._checked, library, waiting)

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        return len(nodes.nodes) + (self._gathering.count if self._gathering is not None else 0)

    # --- private helpers of the methods above

    def _cluster(self) -> Cluster:
        try:
            from paceline.targets.kubernetes.api import cluster_of
        except ImportError as error:
            raise TargetError(
                f"{self._checked.title} needs lightkube and httpx2: pip install 'paceline[kubernetes]' ({error})."
            ) from error
        return cluster_of(*self._checked.place)

    def _may_forward(self, cluster: Cluster, workspace_dir: Path) -> bool:
        """Return whether the user may forward ports to pods."""
        path = answers_dir(workspace_dir) / f"{self.name}.rights.json"
        found = kept(path)
        told = float(str(found.get("told") or 0))
        if found.get("context") != self._checked.context or not 0 <= time.time() - told < _RIGHTS_S:
            may = all(cluster.may(verb, "pods/portforward") for verb in ("get", "create"))
            found = {"told": time.time(), "context": self._checked.context, "forwards": may}
            keep(path, found)
        return bool(found["forwards"])

    def _check_volume(self, cluster: Cluster, name: str, node_count: int) -> None:
        try:
            claim = cluster.patiently(lambda: cluster.get("persistentvolumeclaims", name), _CHECK_S)
        except TargetError:
            return  # skip this check, because the user's Role need not allow reading volume claims
        if claim is None:
            raise TargetError(
                f"{self._checked.title}: the namespace {self._checked.namespace!r} has no PersistentVolumeClaim {name!r}. "
                "`kubectl get pvc` lists them."
            )
        modes = claim["spec"]["accessModes"]
        if node_count > 1 and "ReadWriteMany" not in modes:
            raise TargetError(
                f"{self._checked.title}: volume {name!r} can be mounted on one node ({', '.join(modes)}), and the job has "
                f"{node_count}. Name a claim with the access mode ReadWriteMany."
            )

    def _look_unsubmitted(self, folder: RunFolder, noted: Noted) -> JobStatus:
        if many.is_many(noted) and (found := many.submitted(folder, noted)) is not None:
            note_engine(folder, self.kind, **{name: found[name] for name in ("submitted", "uid", "secrets")})
            return JobStatus(state=QUEUED)
        since = float(noted.get("submitting") or 0.0)
        if locks.is_held(folder.lock) or time.time() - since < _SUBMIT_S:
            return JobStatus(state=QUEUED, message="is being submitted to Kubernetes")
        if noted.get("job_id"):
            self._remove(folder, noted, submitted=False)
        said = "The submitting program ended before it created the run's Job."
        return JobStatus(state=GONE, cause="not_started", message=said)

    def _remove(self, folder: RunFolder, noted: Noted, *, submitted: bool = True) -> None:
        """Delete a run's Job and unused Secrets, unless other runs need the Job."""
        from paceline.targets.kubernetes.leftovers import remove_unused

        readers.keep_mirror(folder, None)
        if submitted and many.is_many(noted) and many.is_job_needed(folder, noted):
            return
        cluster = self._cluster()
        cluster.delete("jobs", str(noted["job_id"]))
        remove_unused(cluster, noted.get("secrets") or (), but=[str(noted["job_id"])])


def _noted(folder: RunFolder) -> Noted:
    """Return a run's recorded Kubernetes values (`engine.json`), and the workspace's label."""
    return {"workspace": _workspace(folder.path.parent.parent), **engine(folder)}


def _workspace(path: Path) -> str:
    return manifests.workspace_label(f"{login_name()}@{socket.gethostname()}:{path.absolute()}")
