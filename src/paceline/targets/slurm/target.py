"""The compute target `slurm`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, preview_ports
from paceline.remote.staging.stage_out_local import is_over, settle
from paceline.runs import store
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, JobStatus, engine, note_engine
from paceline.system import locks
from paceline.system.detached_process import library_dir as library_dir_of
from paceline.system.files import read_json, write_json
from paceline.targets.base import Nodes, Preview, Waiting
from paceline.targets.options import Option, SettingValues
from paceline.targets.polling import Lookout, answers_dir
from paceline.targets.slurm import submission
from paceline.targets.slurm.mpi import check_srun, starter
from paceline.targets.slurm.query import Query, has_ended, job_uses, look_of
from paceline.targets.slurm.scheduler import PATIENCE_S, Scheduler
from paceline.targets.slurm.script import Array, array_text, controller_text, job_name, listed_id, sbatch_text
from paceline.targets.slurm.settings import OPTIONS, SlurmSettings
from paceline.targets.slurm.states import QUEUE_FORMAT, parse_sinfo, sinfo_words
from paceline.targets.slurm.submission import Extension
from paceline.targets.status import NodeStatus, SettingError, Status

if TYPE_CHECKING:
    from paceline.runs.remote_status import Channel
    from paceline.targets.slurm.allocation import Allocation
    from paceline.targets.slurm.login import Login

#: Seconds between two queries for further nodes that an elastic run could use.
_LOOKOUT_S = 5.0
#: Maximum number of jobs that the status of the cluster lists, each with its user.
_MOST_JOBS = 1_000
_DOWN = ("down", "drain", "fail", "maint", "unk", "error", "no_respond", "not_responding", "power_down", "powered_down")


class SlurmTarget:
    """A Slurm cluster as a compute target. One object serves one run."""

    kind: ClassVar[str] = "slurm"
    OPTIONS: ClassVar[tuple[Option, ...]] = OPTIONS

    def __init__(self, name: str = "slurm", settings: SettingValues | None = None) -> None:
        self.name = name
        self.settings = SlurmSettings.of(name, settings or {})
        self._title = f"compute target {name!r}"
        self._scheduler = Scheduler(self._title, self.settings)
        self._had_nodes = False
        #: Only for an elastic run's supervisor: the job that holds additional nodes, and a poller of the number of free nodes.
        self._extension: Extension | None = None
        self._lookout: Lookout[int] | None = None

    # --- methods for the submitting program

    def check(self, job: Job) -> None:
        check_srun(job, self._scheduler)
        submission.try_out(self._scheduler, self.script(job), lacks_nodes=self._lacks_nodes)

    def preview(self, job: Job) -> Preview:
        nodes = tuple(
            Node(
                node_rank=rank,
                name=f"{self.name}-{rank}",
                address=f"{self.name}-{rank}",
                cores=self.settings.cpus_per_process * job.process_count_per_node,
                gpus=tuple(map(str, range(job.process_count_per_node))) if job.use_gpu else (),
            )
            for rank in range(job.node_count)
        )
        begin = starter(job, self.settings, "JOB_ID", [node.name for node in nodes])
        return Preview(nodes=nodes, ports=preview_ports(job), starter=begin)

    def script(
        self,
        job: Job,
        *,
        run_id: str = "RUN_ID",
        run_dir: str = "/RUN_FOLDER",
        library_dir: str = "/LIBRARY",
        python: str | None = None,
    ) -> str:
        """Return the batch script for --dry-run, with placeholders in capitals."""
        return sbatch_text(
            job,
            self.settings,
            run_id=run_id,
            run_dir=PurePosixPath(run_dir),
            library_dir=PurePosixPath(library_dir),
            python=self._python(python),
        )

    def _python(self, submitting: str | None = None) -> str:
        # With a login host, the nodes do not have the interpreter of the submitting machine. So use the nodes' python3.
        return self.settings.python or ("python3" if self.settings.login else submitting or sys.executable)

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Record the run as submitted soon; `start_supervisor` submits its Slurm job."""
        self._job = job
        note_engine(RunFolder(run_dir), self.kind, user=submission.user_here(), submitting=time.time())

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        """Submit the run's batch script, which starts the supervisor. Return 0.

        Raises:
            EngineError, TargetError: Slurm does not answer for minutes, or refuses the job.
        """
        folder = RunFolder(run_dir)
        user, run_dir_there, library_there = self._place(folder, library_dir)
        script = self.script(
            self._job, run_id=folder.run_id, run_dir=run_dir_there, library_dir=library_there, python=python
        )
        self._submit(folder, script, user)
        self._cancel_requested([folder])
        return 0

    def check_alike(self, job: Job) -> None:
        """Accept every job: Slurm can run any runs as a job array."""

    def start_supervisors(
        self, job: Job, run_dirs: Sequence[Path], library_dir: Path, python: str, at_once: int
    ) -> None:
        """Submit runs that differ only in arguments as one job array.

        Raises:
            EngineError, TargetError: Slurm does not answer for minutes, or refuses the job.
        """
        folders = [RunFolder(run_dir) for run_dir in run_dirs]
        array = Array.of([folder.run_id for folder in folders], at_once)
        for folder, task in zip(folders, array.tasks, strict=True):
            note_engine(
                folder, self.kind, user=submission.user_here(), submitting=time.time(), array=array.name, task=task
            )
        placed = [self._place(folder, library_dir) for folder in folders]
        user, run_dir_there, library_there = placed[0]
        script = array_text(
            job,
            self.settings,
            array,
            runs_dir=PurePosixPath(run_dir_there).parent,
            library_dir=PurePosixPath(library_there),
            python=self._python(python),
        )
        array_id = submission.submit(self._scheduler, script, name=job_name(array.name), user=user, tell=_tell)
        job_ids = [f"{array_id}_{task}" for task in array.tasks]
        for folder, job_id in zip(folders, job_ids, strict=True):
            note_engine(folder, self.kind, job_id=job_id, submitted=time.time())
        self._query(folders[0], user).remember(array_id, *job_ids)
        self._cancel_requested(folders)

    def _cancel_requested(self, folders: Sequence[RunFolder]) -> None:
        """Cancel the runs whose cancellation came before their job."""
        for folder in folders:
            if folder.cancel_request.exists():
                self.cancel(folder, store.stored(folder))

    def check_controller(self) -> None:
        if self.settings.login is not None:
            raise TargetError(
                f"{self._title} has the login host {self.settings.login!r}, behind which the cluster sees a folder of its own "
                "and not this workspace, where a sweep's controller has all that it knows. Leave controller out, or submit on "
                "the cluster to a target without login, with a workspace that all nodes see."
            )

    def start_controller(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Submit a sweep's controller, as a job of one core.

        Raises:
            EngineError, TargetError: Slurm does not answer for minutes, or refuses the job.
        """
        self.check_controller()
        folder, user = RunFolder(run_dir), submission.user_here()
        # Replace the file, because it may name an earlier job of this sweep.
        write_json(folder.engine, {"engine": self.kind, "user": user, "submitting": time.time()}, sync=True)
        script = controller_text(
            self.settings,
            run_id=folder.run_id,
            run_dir=PurePosixPath(run_dir.absolute()),
            library_dir=PurePosixPath(library_dir.absolute()),
            python=self._python(python),
        )
        self._submit(folder, script, user)

    def _submit(self, folder: RunFolder, script: str, user: str) -> None:
        job_id = submission.submit(self._scheduler, script, name=job_name(folder.run_id), user=user, tell=_tell)
        # If this process is killed before it notes the job's number, a later call finds the job by its name.
        note_engine(folder, self.kind, job_id=job_id, submitted=time.time())
        self._query(folder, user).remember(job_id)

    def _place(self, folder: RunFolder, library_dir: Path) -> tuple[str, str, str]:
        """Send the run if necessary. Return the cluster's (uid, run folder, library folder)."""
        if self.settings.login is None:
            return submission.user_here(), str(folder.path.absolute()), str(library_dir.absolute())
        has_secrets = folder.secrets.exists()
        there = self._login().push(folder, library_dir)
        note_engine(folder, self.kind, user=there.user, run_dir=there.run_dir, has_secrets=has_secrets, mirrored=True)
        return there.user, there.run_dir, there.library_dir

    def release(self, run_dir: Path) -> None:
        """Cancel a failed submission's job, and remove its secrets. In a supervisor, do nothing."""
        noted = engine(RunFolder(run_dir))
        if self._extension is not None:
            self._extension.cancel()
        with contextlib.suppress(TargetError, EngineError):
            if noted.get("job_id") and noted["job_id"] != listed_id(os.environ):
                self._scheduler.call(["scancel", str(noted["job_id"])])
            self._remove_secrets(RunFolder(run_dir), noted)

    # --- methods for programs that read the run's status

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        noted = engine(folder)
        if settle(folder):
            return JobStatus(state=RUNNING)
        query = self._query(folder, noted.get("user"))
        if not (job_id := noted.get("job_id")):
            return self._look_by_name(folder, query, noted)
        job = query.job(str(job_id), float(noted.get("submitted") or 0.0))
        # A pending run has no files to fetch. With hundreds of pending runs, each fetch would cost an ssh connection.
        has_begun = bool(record.attempts) or job is None or look_of(job).state != QUEUED
        if self.settings.login is not None and "run_dir" in noted and has_begun:
            self._login().pull(folder, str(noted["run_dir"]))
            if settle(folder):
                return JobStatus(state=RUNNING)
        if job is None or has_ended(job):
            self._remove_secrets(folder, noted)
        if job is None:
            return JobStatus(
                state=GONE,
                cause="engine",
                message=f"Slurm knows nothing of job {job_id} any more, and keeps no account of how it ended.",
            )
        if not has_ended(job) and _is_newer(folder.state, query.answered_at):
            # The supervisor has written the run's state after Slurm's answer, so the answer is out of date.
            return JobStatus(state=RUNNING)
        return look_of(job, python=self._python(), run_dir=str(noted.get("run_dir") or folder.path))

    def _remove_secrets(self, folder: RunFolder, noted: Mapping[str, Any]) -> None:
        """Remove a run's secrets from the cluster if `noted` (engine.json) mentions secrets."""
        if self.settings.login is not None and noted.get("has_secrets"):
            self._login().remove(f"{noted['run_dir']}/{folder.secrets.name}")
            note_engine(folder, self.kind, has_secrets=False)

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        """Cancel a pending job. A running job's supervisor reads `cancel.json`."""
        if is_over(folder):
            return  # the run is over, and its next reader completes the cancellation
        noted = engine(folder)
        if self.settings.login is not None and "run_dir" in noted:
            # Copy the cancel request into the run's folder on the cluster, where the supervisor reads it.
            self._login().put(f"{noted['run_dir']}/cancel.json", read_json(folder.cancel_request) or {})
        if noted.get("job_id"):
            if "task" in noted:
                # First hold the task, which separates it from its array. Otherwise scancel --state cancels all pending tasks.
                self._scheduler.call(["scontrol", "hold", str(noted["job_id"])])
            # Cancel the job only if it is pending. The supervisor of a running job ends the job.
            done = self._scheduler.call(["scancel", "--state=PENDING", str(noted["job_id"])])
            if done.returncode != 0 and "Invalid job id" not in done.stderr:
                raise EngineError(f"{self._title}: job {noted['job_id']} can't be canceled: {done.said}.")
            self._query(folder, noted.get("user")).forget_answer()

    def channel(self, folder: RunFolder) -> Channel | None:
        """Return the channel of `paceline exec`; None if nodes share the run's folder."""
        run_dir = engine(folder).get("run_dir")
        if self.settings.login is None or run_dir is None:
            return None
        from paceline.targets.slurm.login import LoginChannel

        return LoginChannel(self._login(), str(run_dir))

    # --- methods for the supervisor, inside the job

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        from paceline.targets.slurm.allocation import AGAIN_S, OPEN_S, Allocation, LinkError, open_nodes

        allocation, job_id = Allocation.of(os.environ), listed_id(os.environ)
        # This process runs inside the cluster, so call Slurm without the login host.
        self._scheduler = Scheduler(self._title, replace(self.settings, login=None))
        folder = RunFolder(run_dir)
        if engine(folder).get("job_id") != job_id:
            note_engine(folder, self.kind, job_id=job_id, submitted=time.time())
        workspace = run_dir.parent.parent
        try:
            # In a later attempt, wait only briefly for a lost node: it answers soon if only its agent process was killed.
            limit_s = AGAIN_S if self._had_nodes else OPEN_S
            if job.node_range:
                allocation = self._extended(allocation, job, folder.run_id)
            nodes = open_nodes(allocation, job, self.settings, library_dir_of(workspace), waiting, limit_s=limit_s)
            self._had_nodes = True
            return nodes
        except LinkError as error:
            if not (job.max_restarts or job.node_range):
                raise
            self._requeue(allocation.job_id, error, waiting)
            return None

    def _extended(self, allocation: Allocation, job: Job, run_id: str) -> Allocation:
        """Return the allocation, extended by the nodes of the run's second Slurm job."""
        self._lookout = None
        if self._extension is None:
            self._extension = Extension(self._scheduler, run_id, listed_id(os.environ) or allocation.job_id)
        self._extension.begin()
        cores = self.settings.cpus_per_process * job.process_count_per_node
        return allocation.extended(self._extension.current(), self._extension.job_id, cores)

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        extension = self._extension
        if extension is None:
            return len(nodes.nodes)
        if self._lookout is None:
            held = [node.name for node in nodes.nodes]
            self._lookout = Lookout(lambda: extension.look(job, held), _LOOKOUT_S, 0)
        return len(nodes.nodes) + self._lookout.found()

    def _requeue(self, job_id: str, error: EngineError, waiting: Waiting) -> None:
        """Requeue the run's job for other nodes; this program ends. Raise EngineError if Slurm refuses."""
        # The error may already end with a full stop. End the text with exactly one full stop.
        why = f"{str(error).rstrip('.')}."
        done = self._scheduler.call(["scontrol", "requeue", job_id])
        # A negative code means that a signal ended scontrol, because Slurm has requeued the job and ends the job's processes.
        if done.returncode > 0:
            raise EngineError(f"{why} The job can't be requeued to get other nodes: {done.said}.") from error
        say(f"{why} So Slurm was asked to put the job back into the queue, where it gets other nodes.")
        # Slurm now sends SIGTERM to this process, as in a preemption. Then `waiting` returns True.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if waiting("requeued by Slurm"):
                return
            time.sleep(0.2)
        raise EngineError(f"{why} The job was requeued to get other nodes, but Slurm has not ended it in 60 s.")

    # --- methods that describe the cluster for users

    def status(self) -> Status:
        """Query the nodes and queue of the cluster, or of the configured partition.

        Raises:
            SettingError: The partition does not exist; the message lists the existing partitions.
        """
        where = ["-p", self.settings.partition] if self.settings.partition else []
        done = self._scheduler.call(["sinfo", *where, "-h", "-N", "-O", sinfo_words()])
        if done.returncode != 0:
            raise EngineError(f"{self._title}: sinfo can't tell of the nodes: {done.said}.")
        nodes = parse_sinfo(done.stdout)
        if not nodes and self.settings.partition:
            self._check_partition(self.settings.partition)
        # One call of squeue lists all users' queued and running jobs, with each job's owner and resources.
        jobs = self._scheduler.call(["squeue", "-h", *where, "-t", "PENDING,RUNNING", "-o", QUEUE_FORMAT])
        lines = jobs.stdout.splitlines() if jobs.returncode == 0 else None
        words = [line.split("|", 2)[1] for line in lines if "|" in line] if lines is not None else None
        return Status(
            nodes=tuple(
                NodeStatus(
                    name=node.name,
                    cores=node.cores,
                    used_cores=node.used_cores,
                    gpus=node.gpus,
                    used_gpus=node.used_gpus,
                    is_up=not any(word in node.state.lower() for word in _DOWN) and not node.state.endswith("*"),
                    state=node.state,
                    message=node.reason,
                )
                for node in nodes
            ),
            queued=words.count("PENDING") if words is not None else None,
            running=words.count("RUNNING") if words is not None else None,
            jobs=tuple(job_uses((lines or [])[:_MOST_JOBS])),
        )

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Any]]:
        """Allocate `node_count` nodes (default: two) for checks. Yield connections to their agents."""
        from paceline.targets.slurm.examine import examined

        if node_count is None:
            node_count = min(2, max(1, len(self.status().up)))
        with examined(self._scheduler, node_count) as links:
            yield links

    # --- private helpers of the methods above

    def _check_partition(self, wanted: str) -> None:
        # Compare with the list of all partitions, because sinfo prints no nodes and exits with 0 for an unknown partition.
        done = self._scheduler.call(["sinfo", "-h", "-o", "%R"])
        there = sorted(set(done.stdout.split()))
        missing = [name for name in wanted.split(",") if name not in there]
        if missing and there:
            raise SettingError(
                f"{self._title}: Slurm has no partition {', '.join(map(repr, missing))}; it has {', '.join(there)}. "
                "Change the setting partition."
            )

    def _lacks_nodes(self) -> bool:
        if self.status().state != "up":
            return True
        done = self._scheduler.call(["scontrol", "show", "reservation", "-o"])
        return "ReservationName=" in done.stdout

    def _login(self) -> Login:
        from paceline.targets.slurm.login import Login

        return Login(self._scheduler)

    def _look_by_name(self, folder: RunFolder, query: Query, noted: Mapping[str, Any]) -> JobStatus:
        since = float(noted.get("submitting") or 0.0)
        waits = JobStatus(state=QUEUED, message="is being given to Slurm")
        if locks.is_held(folder.lock):
            return waits
        job = query.job_named(job_name(noted.get("array") or folder.run_id), noted.get("task"))
        if job is not None:
            note_engine(folder, self.kind, job_id=job.job_id, submitted=since)
            return look_of(job, run_dir=str(folder.path))
        if time.time() - since < PATIENCE_S:
            return waits
        self._remove_secrets(folder, noted)
        return JobStatus(
            state=GONE, cause="not_started", message="The submitting program ended before it gave the run to Slurm."
        )

    def _query(self, folder: RunFolder, user: str | None) -> Query:
        return Query(answers_dir(folder.path.parent.parent), self._scheduler, str(user or submission.user_here()))


def _is_newer(path: Path, time_s: float) -> bool:
    try:
        return path.stat().st_mtime > time_s
    except OSError:
        return False


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
