"""The protocols of a compute target and of its nodes.

    Target    checks a job, queues it, starts its supervisor: used by the submitting program
    Nodes     the machines that a run holds: used by the run's supervisor, on whichever machine it runs

Seven optional protocols, each implemented completely or not at all (the conformance suite checks):

    EarlyStart    starts a supervisor process while the job is checked
    Queued        the engine has a queue, and runs the supervisor in its job
    Alike         the engine accepts many similar runs in one call, such as a job array
    Controlling   the engine runs the controller of a sweep in a small job
    Examined      `paceline compute` and `paceline compute doctor` can query the engine
    Elastic       gives a run as many nodes as are available, between a minimum and a maximum
    Cleared       runs leave objects in the engine that `paceline prune --compute` removes

Some members are optional. A target of a configurable kind has `OPTIONS` and `settings`. A target has `login` if it
needs a password, and `script_python(links)` if nodes have their own interpreters (docs/compute.md). `Nodes` may have:

    disks(paths)    {place: (free bytes, total bytes, number of the file system)} of these folders' disks. A place is
        the path on the supervisor's machine, or "PATH on NODE". Without `disks`, no disk is checked.
    loads(workers)   {node rank: {name: number}}: use of nodes and workers, as `paceline.observe.node.load` measures it.
        workers: {node rank: argument of `LoadMeter.look`}. Without `loads`, the load of a run is unknown.
    put(node_rank, path, data)   write a small file and its folder on a node, for the owner only; may raise OSError.
        Without `put`, `paceline exec` works only if nodes see the supervisor's folders.
    silence_s   seconds without a message after which a node is lost, default 15. When workers fail and the loss of a
        node may be the cause, the supervisor waits this long for a report of the loss.
    kill_session(pid, node_rank)   kill the other processes in the session of a command that has ended. Without it, no
        single lost worker can be replaced (`on_failure="replace"`).
    note_hang(since)   record since when the run hangs (None: it does not hang), to inform runs that wait for its nodes.
    leave_reason()     return why the run has to leave its nodes, such as for another run, or "". The supervisor then
        ends the workers and queues the run again. This does not count as a restart.
    on_news     a callback without arguments, called from any thread when a command on a node has ended. Without it,
        the supervisor polls.
    check       a callback without arguments, which nodes call before they write files of the run on this machine. It
        ends this process if another one has taken over the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from paceline.job.job import Job
from paceline.job.plan import Command, Node, ProcessExit, RemotePaths, StartedCommand, Starter
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from paceline.remote.link.copies import LeftBehind
    from paceline.runs.record import RunRecord
    from paceline.runs.remote_status import Channel, JobStatus
    from paceline.targets.status import Status

#: A callback that receives the reason why a run waits, such as "2 runs ahead", and returns whether to stop waiting.
Waiting: TypeAlias = "Callable[[str], bool]"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The nodes, ports and MPI starter, such as srun, that `--dry-run` shows for a job."""

    nodes: tuple[Node, ...]
    ports: tuple[int, ...]
    starter: Starter | None = None


class Nodes(Protocol):
    """The nodes that a run holds. No method blocks for long."""

    nodes: tuple[Node, ...]
    #: Network ports that are free on the first node. The run's workers may use them.
    ports: tuple[int, ...]

    def send(self, folder: RunFolder, library_dir: Path) -> RemotePaths:
        """Send the run's folder, or only the necessary files, to all nodes.

        Raises:
            TargetError: A node can't store the files; the message names the node and the reason.
        """

    def shell(self, node_rank: int) -> Mapping[str, str] | None:
        """Return a node's environment variables; None means the submitting program's variables."""

    def begin(self, attempt: int) -> None:
        """Create an attempt's folder on the nodes, and regularly copy its files here."""

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> StartedCommand:
        """Start a command on its node, and return the started command.

        shell: Environment variables, which the command's own variables override.

        Raises:
            OSError: The command can't be started.
        """

    def signal(self, pid: int, node_rank: int, number: int) -> bool:
        """Signal a process on a node. Return False if the process is gone."""

    def is_alive(self, pid: int, node_rank: int) -> bool:
        """Return whether a process exists; always False on a lost node."""

    def ended(self) -> list[ProcessExit]:
        """Return the commands on the nodes that have ended since the last call."""

    def renew_ports(self) -> None:
        """Choose new ports on the first node, as other programs use the current ports."""

    def lost(self) -> dict[int, str]:
        """Return {node rank: how the loss was detected} of lost nodes."""

    def fetch(self) -> None:
        """Copy the run's remaining files from the nodes into its folder.

        Raises:
            TargetError: Some files can't be copied; the message says which files, and where they are.
        """

    def kill_all(self) -> None:
        """Kill all processes that the run started on the nodes."""

    def oom_kills(self) -> dict[int, int]:
        """Return {node rank: number of processes killed for memory} of nodes that answer."""

    def is_disk_full(self) -> bool:
        """Return whether a node lacks the disk space for a worker's report."""

    def close(self) -> None:
        """End the remaining processes, and release the nodes. Idempotent."""


class Target(Protocol):
    """A source of nodes. One object serves one run."""

    def check(self, job: Job) -> None:
        """Raise an error if this target can never run the job.

        Raises:
            TargetError: The job needs more than the target has; the message names both.
        """

    def preview(self, job: Job) -> Preview:
        """Return example nodes that `--dry-run` shows for the job. Reserve nothing."""

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Add the run to the queue, which keeps the order of submission."""

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        """Start the run's supervisor, detached, with the run's lock. Return its pid.

        Return 0 if the target's engine, such as Slurm, starts the supervisor later on another machine.
        """

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        """Return the run's nodes once it holds them, or None once `waiting` returns True.

        After the loss of a node, the supervisor calls this method again.

        Raises:
            TargetError: The target can never provide the nodes.
        """

    def release(self, run_dir: Path) -> None:
        """Give up the queue position and nodes of a run without supervisor. Idempotent."""


@runtime_checkable
class EarlyStart(Protocol):
    """A target that can start a supervisor process before the job is checked."""

    def load_supervisor(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Start a supervisor process, which imports modules while `run_dir` is being made.

        Later, `start_supervisor` passes the run to it. If the submission fails, `release` ends the supervisor.
        Otherwise, the supervisor ends with this program.
        """


@runtime_checkable
class Queued(Protocol):
    """A target such as Slurm, whose queue starts the run's supervisor in a job."""

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        """Query the engine (Slurm, Ray) for the run's status, and fetch its new files."""

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        """Cancel the run's job in the engine, if its supervisor can't end it."""

    def channel(self, folder: RunFolder) -> Channel | None:
        """Return a connection to the supervisor for `paceline exec`; None if it reads this `folder`."""

    def script(self, job: Job) -> str | None:
        """Return the job script, such as sbatch's, which --dry-run prints, or None."""


#: Maximum number of runs in one `start_supervisors` call. The runs' folders `<parent>_<n>` differ only in the last three digits.
ALIKE_SPAN = 1000


@runtime_checkable
class Alike(Protocol):
    """A target, such as Slurm, that accepts many similar runs in one job array."""

    def check_alike(self, job: Job) -> None:
        """Raise an error if one call can't submit many runs of this job.

        Raises:
            TargetError: The message has the reason.
        """

    def start_supervisors(
        self, job: Job, run_dirs: Sequence[Path], library_dir: Path, python: str, at_once: int
    ) -> None:
        """Submit runs, whose jobs differ only in arguments, by one request to the engine.

        run_dirs: Folders `<parent>_<n>` with consecutive n, which differ only in the last three digits (`ALIKE_SPAN`).
        at_once: How many of the runs may run at the same time.
        """


@runtime_checkable
class Controlling(Protocol):
    """A target, such as Slurm, that can run a sweep's controller as a job."""

    def check_controller(self) -> None:
        """Raise an error if the target's jobs certainly can't see the workspace.

        Raises:
            TargetError: They can't see the workspace; the message has the reason.
        """

    def start_controller(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Submit a sweep's controller (`python -m paceline.sweeps RUN_DIR`) to the engine.

        Raises:
            TargetError: The engine refuses the submission.
        """


@runtime_checkable
class Examined(Protocol):
    """A target that `paceline compute show` and `paceline compute doctor` can query."""

    def status(self) -> Status:
        """Return the target's nodes and how they are used.

        Raises:
            EngineError: The engine does not answer.
        """

    def examine(self, node_count: int | None = None) -> AbstractContextManager[list[Any]]:
        """Connect to nodes outside a run, for a `with` block that checks or cleans them.

        node_count: Number of nodes; None for the target's default. The block gets a list: for each node, a `Link` to a Paceline
            process on the node, or an `Unreachable` if the connection failed.

        Raises:
            TargetError: The nodes can't be allocated.
        """


@runtime_checkable
class Elastic(Protocol):
    """A target that can give a run any number of nodes in a range.

    For a job with a `node_range`, `wait_for_nodes` waits only for the minimum, and returns as many nodes as possible.
    """

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        """Return how many nodes the run would get by giving back `nodes` and allocating again.

        The supervisor calls this method every second, so the method must not block. The number may be some seconds old.
        """


@runtime_checkable
class Cleared(Protocol):
    """A target, such as Kubernetes, that keeps ended runs' objects until somebody removes them."""

    def clear(self, runs_dir: Path, *, dry_run: bool = False) -> Iterator[LeftBehind]:
        """Remove objects of ended runs, and yield them. With `dry_run`, only yield them.

        Raises:
            EngineError: The engine does not answer.
        """


#: The protocols that a target may implement in addition to `Target`.
PARTS: tuple[type, ...] = (EarlyStart, Queued, Alike, Controlling, Examined, Elastic, Cleared)
