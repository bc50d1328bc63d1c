"""The compute target `ray`, used before a run and inside its cluster."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, port_count, preview_ports
from paceline.runs import states
from paceline.runs.failure import CAUSES
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, JobStatus, engine, is_copy
from paceline.system.files import read_json, write_json
from paceline.targets.base import Nodes, Preview, Waiting
from paceline.targets.options import SettingValues
from paceline.targets.ray.client import RayClient, RayJob, RayNode, all_jobs
from paceline.targets.ray.demand import ClusterDemand, NodeResources, demand_of, too_large
from paceline.targets.ray.entry import (
    ADDRESS_VARIABLE,
    COMPLAINT,
    LIBRARY_VARIABLE,
    RAY_PYTHON_VARIABLE,
    SUBMITTER_VARIABLE,
    controller_entrypoint,
    shared_entrypoint,
)
from paceline.targets.ray.settings import OPTIONS, RaySettings, own_folder, read_settings
from paceline.targets.status import JobUse, NodeStatus, Status

if TYPE_CHECKING:
    from paceline.remote.link import Link
    from paceline.runs.remote_status import Channel
    from paceline.targets.ray.allocate import RayNodes

_PREFIX = "paceline-"
#: A name to record for the user who has stopped the Ray job, because Ray does not report the user.
_BY_RAY = "Ray (ray job stop)"
#: Seconds for which Ray may list a lost node as alive, since Ray's health checks take a minute.
_AVOID_S = 90.0
#: Seconds from the end of the workers' grace period until Ray kills a stopped job.
_STOP_S = 20
#: Ray's type of a job's failure (JobErrorType in ray/dashboard/modules/job/common.py) -> cause of the run's failure.
_CAUSES = {
    "JOB_SUPERVISOR_ACTOR_DIED": "node_lost",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "node_lost",
    "JOB_ENTRYPOINT_COMMAND_ERROR": "supervisor",
}


class RayTarget:
    """A Ray cluster. One object serves one run."""

    kind: ClassVar[str] = "ray"
    OPTIONS: ClassVar = OPTIONS

    def __init__(self, name: str = "ray", settings: SettingValues | None = None) -> None:
        self.settings: RaySettings = read_settings(name, settings or {})
        self._client = RayClient(self.settings)
        #: The nodes that the run holds, or held last; and Ray's id of each lost node -> time at which Paceline detected the loss.
        self._held: RayNodes | None = None
        self._avoided: dict[str, float] = {}

    # Methods that the submitting program calls

    def check(self, job: Job) -> None:
        alive = [node for node in self._client.nodes() if node.is_alive]
        nodes = [NodeResources(name=node.name, total=node.total) for node in alive]
        demand = demand_of(job.resized(job.least_nodes), self.settings)
        if not self.settings.autoscaling and (why := too_large(demand, nodes)):
            raise TargetError(
                f"compute target {self.settings.name!r}: {why}. Ask for less, or set autoscaling if the cluster grows."
            )

    def preview(self, job: Job) -> Preview:
        demand = demand_of(job, self.settings)
        alive = [node for node in self._client.nodes() if node.is_alive]
        # Put nodes with room for a bundle first, because Ray will choose among these nodes.
        alive.sort(key=lambda node: not ClusterDemand(bundles=demand.bundles[:1]).fits([node.total]))
        nodes = []
        count = max(job.least_nodes, min(job.node_count, len(alive))) if job.node_range else job.node_count
        for rank, bundle in enumerate(demand.bundles[:count]):
            name = alive[rank].name if rank < len(alive) else f"ray-{rank}"
            gpus = tuple(str(number) for number in range(int(bundle.get("GPU", 0))))
            nodes.append(Node(node_rank=rank, name=name, address=name, cores=max(1, int(bundle["CPU"])), gpus=gpus))
        return Preview(nodes=tuple(nodes), ports=preview_ports(job))

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Do nothing, because Ray itself queues the run's request for nodes."""

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        folder = RunFolder(run_dir)
        told: dict[str, Any] = {
            **{"engine": "ray", "job_id": f"{_PREFIX}{folder.run_id}", "address": self.settings.address},
            # Ray never requeues a job, so SIGTERM means that a user has stopped the job.
            **{"sigterm": "cancel", "by": _BY_RAY},
            **({} if self.settings.is_shared else {"mirrored": True}),
        }
        # Write `engine.json` before the submission, so that readers of the run know which engine to query.
        write_json(folder.engine, {**told, "time": time.time()})
        if self.settings.is_shared:
            script = shared_entrypoint(run_dir, library_dir, python)
            runtime_env: dict[str, Any] = {}
        else:
            from paceline.targets.ray.object_sync import send_run

            told["has_secrets"] = folder.secrets.exists()
            script, runtime_env = send_run(self.settings, self._client, folder, library_dir)
        job = (read_json(folder.job) or {}).get("job") or {}
        # By default Ray kills a stopped job after 3 s, which would cut the workers' grace period short.
        grace_s = float(job.get("grace_period_seconds") or 0.0)
        runtime_env["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s + _STOP_S))}
        metadata = {"job_name": folder.run_id, "paceline_run_id": folder.run_id, "paceline_user": user_name()}
        self._client.submit(script, told["job_id"], runtime_env, metadata)
        write_json(folder.engine, {**told, "time": time.time()})
        if folder.cancel_request.exists():  # Ray has ignored `cancel`, because it did not know the job
            self._client.stop(told["job_id"])
        return 0

    def check_controller(self) -> None:
        if not self.settings.is_shared:
            raise TargetError(
                f"compute target {self.settings.name!r} sends runs through datastore {self.settings.datastore!r}: its cluster "
                "does not see this workspace, where a sweep's controller has all that it knows. Leave controller out, or share "
                "the workspace's folder with the cluster and leave datastore out."
            )

    def start_controller(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Submit a sweep's controller, as a job without resources on the cluster's head."""
        self.check_controller()
        folder = RunFolder(run_dir)
        # Ray accepts no id twice, not even of an ended job, so a resumed controller needs a new job id.
        job_id = f"{_PREFIX}{folder.run_id}-{time.time_ns() // 1_000_000}"
        told = {"engine": "ray", "job_id": job_id, "address": self.settings.address}
        write_json(folder.engine, {**told, "time": time.time()})
        script = controller_entrypoint(run_dir, library_dir, python, self.settings.token_env)
        self._client.submit(script, job_id, {}, {"job_name": folder.run_id, "paceline_run_id": folder.run_id})
        write_json(folder.engine, {**told, "time": time.time()})

    def release(self, run_dir: Path) -> None:
        if RAY_PYTHON_VARIABLE in os.environ or not RunFolder(run_dir).engine.exists():
            return  # this process is part of the Ray job and ends with it, or the run has no Ray job
        with contextlib.suppress(TargetError, EngineError):
            self._client.stop(f"{_PREFIX}{RunFolder(run_dir).run_id}")

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        if self._settled(folder):
            return JobStatus(state=RUNNING)
        told = engine(folder)
        job_id = str(told.get("job_id") or f"{_PREFIX}{folder.run_id}")
        known = all_jobs(folder.path.parent.parent, self.settings.address, self._client.jobs, _PREFIX)
        job = known.jobs.get(job_id)
        more_comes = False
        if not self.settings.is_shared:
            from paceline.targets.ray.object_sync import fetch_run

            more_comes = fetch_run(self.settings, folder)
            if self._settled(folder):
                return JobStatus(state=RUNNING)
        if job is None and known.time < float(told.get("time") or 0.0) + 1.0:
            return JobStatus(state=QUEUED, message="Ray has just been given the run")
        if job is not None and job.status == "PENDING" and record.status != states.NOT_STARTED:
            return JobStatus(state=RUNNING)  # the supervisor has started since Ray sent this answer
        found = self._told(job)
        if found.state == GONE and told.get("has_secrets"):
            from paceline.targets.ray.object_sync import remove_sealed

            remove_sealed(self.settings, folder)
            write_json(folder.engine, {**told, "has_secrets": False})
        # Don't report the end while another process fetches the run's last files, which may take minutes.
        return JobStatus(state=RUNNING) if more_comes and found.state == GONE else found

    def channel(self, folder: RunFolder) -> Channel | None:
        """Return the channel of `paceline exec`; None if nodes share the run's folder."""
        if self.settings.is_shared or not is_copy(folder):
            return None
        from paceline.targets.ray.channel import StoreChannel
        from paceline.targets.ray.object_sync import store_record

        return StoreChannel(store_record(self.settings, folder.path.parent.parent), folder)

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        from paceline.remote.staging.stage_out_local import is_over

        if is_over(folder):
            return  # the run is over, and its next reader completes the cancellation
        self._client.stop(str(engine(folder).get("job_id") or f"{_PREFIX}{folder.run_id}"))

    def script(self, job: Job) -> str | None:
        return None

    def status(self) -> Status:
        """Return the cluster's nodes and job counts as Ray reports them.

        Raises:
            EngineError, TargetError: The cluster does not answer, or refuses the request.
        """
        nodes = self._client.nodes(usage=True)
        alive = {node.name for node in nodes if node.is_alive}
        shown = [node for node in nodes if node.is_alive or node.name not in alive]
        jobs = self._client.jobs()
        return Status(
            nodes=tuple(_status(node) for node in shown),
            queued=sum(job.status == "PENDING" for job in jobs),
            running=sum(job.status == "RUNNING" for job in jobs),
            message=f"Ray {self._client.version()} at {self.settings.address}",
            jobs=tuple(
                JobUse(
                    run_id=job.run_id or job.submission_id,
                    user=job.user,
                    is_waiting=job.status == "PENDING",
                    reason=job.message if job.status == "PENDING" else "",
                )
                for job in jobs
                if job.status in ("PENDING", "RUNNING")
            ),
        )

    # Methods for the supervisor, which runs inside the cluster

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        from paceline.targets.ray.allocate import gather
        from paceline.targets.ray.placement_group import GroupRequest

        now, settings = time.monotonic(), self.settings
        if self._held is not None:
            self._avoided |= dict.fromkeys(self._held.gone, now)
        try:
            ray_python, library = os.environ[RAY_PYTHON_VARIABLE], os.environ[LIBRARY_VARIABLE]
        except KeyError as error:
            raise TargetError(
                f"nodes of a Ray cluster are only available inside a Ray job, and {error.args[0]} is not set here."
            ) from None
        asked = GroupRequest(
            demand=demand_of(job, settings),
            run_id=run_dir.name,
            ray_python=ray_python,
            library_dir=Path(library),
            address=os.environ.get(ADDRESS_VARIABLE, ""),
            folder=settings.folder or own_folder(),
            python=settings.python,
            submitter=os.environ.get(SUBMITTER_VARIABLE) if settings.is_shared else None,
            patience_s=None if settings.autoscaling else settings.patience_s,
            is_shared=settings.is_shared,
            silence_s=settings.silence_s,
            least=job.least_nodes if job.node_range else None,
            avoid=tuple(node_id for node_id, when in self._avoided.items() if now - when < _AVOID_S),
        )
        self._held = gather(asked, port_count(job), waiting)
        return self._held

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        return len(nodes.nodes) + (self._held.spare() if self._held is not None else 0)

    def _settled(self, folder: RunFolder) -> bool:
        """Store an ended run's outputs in this machine's folders. Return False without outputs."""
        from paceline.remote.staging.stage_out_local import settle

        return not self.settings.is_shared and settle(folder)

    def _told(self, job: RayJob | None) -> JobStatus:
        where = f"the Ray cluster at {self.settings.address}"
        if job is None:
            message = f"T{where[1:]} knows no job of this run: its head was started anew, or somebody deleted it."
            return JobStatus(state=GONE, message=message)
        if job.status == "PENDING":
            return JobStatus(state=QUEUED, message=job.message.split(". ")[0].rstrip("."))
        if job.status == "RUNNING":
            return JobStatus(state=RUNNING)
        if job.status == "STOPPED":
            return JobStatus(state=GONE, cause="cancel", by=_BY_RAY, message=f"Its job was stopped in {where}.")
        cause = _CAUSES.get(job.error_type or "", "engine")
        assert cause in CAUSES, cause
        # The job's message may quote only the job's command. If it has no reason from Paceline, read the job's log.
        if complaints := _complaints(job.message) or _complaints(self._client.logs(job.submission_id)):
            return JobStatus(state=GONE, cause="engine", message=f"{complaints[-1][len(COMPLAINT) :]}.")
        said = " ".join(job.message.split())[:500].rstrip(".")
        return JobStatus(
            state=GONE, cause=cause, message=f"The run's job in {where} ended without its supervisor's word: {said}."
        )

    # Methods for `paceline compute doctor`

    def script_python(self, links: Sequence[Any]) -> str | None:
        """Return the interpreter for jobs that set none; None means Ray's interpreter."""
        from paceline.remote.link import script_python

        return script_python(self.settings.python, sys.executable if self.settings.is_shared else None, links)

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Link]]:
        """Yield links to agents on `node_count` nodes, by default on all usable nodes.

        Raises:
            EngineError, TargetError: Ray provides no nodes, or the nodes can't reach this machine.
        """
        from paceline.targets.ray.examine import examined

        settings = self.settings
        bundle = {"CPU": min(1.0, settings.cpus_per_worker), **settings.resources}
        demand = ClusterDemand(bundles=(bundle,))
        count = node_count or sum(demand.fits([node.total]) for node in self._client.nodes() if node.is_alive)
        if not count:
            raise TargetError(f"compute target {settings.name!r}: no living node has {demand.text}.")
        with examined(self._client, settings, [bundle] * count) as links:
            yield links


def _complaints(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(COMPLAINT)]


def _status(node: RayNode) -> NodeStatus:
    cores, gpus = node.total.get("CPU", 0.0), node.total.get("GPU", 0.0)
    return NodeStatus(
        name=node.name,
        cores=int(cores) if node.is_alive else None,
        used_cores=int(-(-node.used["CPU"] // 1)) if "CPU" in node.used else None,
        gpus=int(gpus) if node.is_alive else None,
        used_gpus=int(-(-node.used["GPU"] // 1)) if "GPU" in node.used else (0 if not gpus else None),
        is_up=node.is_alive,
        state="alive" if node.is_alive else "dead",
        message=node.message or ("head" if node.is_head else ""),
    )
