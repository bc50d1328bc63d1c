"""The protocols of a target and of its nodes.

Target    what a job asks of the machines, the queue, the supervisor's start: for the submitting program
Nodes     the machines that a run holds: for its supervisor, wherever that runs

What more a target may do is in six protocols, each whole or not there (the conformance suite looks):

EarlyStart    a supervisor is loaded while the job is looked at
Queued        an engine has a queue, and runs the supervisor in its job
Alike         an engine takes many runs at once that differ in nothing that it is told
Controlling   an engine looks after a sweep, by a small job of its own
Examined      `paceline compute` and the doctor may ask it
Elastic       it gives a run as many nodes as there are, from a minimum to a maximum

Some members are looked for by themselves: OPTIONS and settings of a kind that can be configured, login of one that asks for
a password, script_python(links) of one whose nodes have interpreters of their own; see docs/compute.md. And of nodes:

    disks(paths)    path, with the node where there are several -> (bytes free, bytes in all, number of the file system) of
        each disk that these folders of the nodes are on, and of the supervisor's own. Without it a run is not warned of a
        disk that fills up.
    loads(workers)    node's rank -> name -> number: how busy it is, and its workers are, as `paceline.observe.node.load` measures
        it; workers: node's rank -> what that is given. Without it nothing is known of how busy a run's nodes and workers are.
    put(node_rank, path, data)   write a small file on a node, for its owner alone, and the folder above it; OSError. Without it
        `paceline exec` works only where nodes see the supervisor's folders.
    silence_s   after how many seconds without a word a node is lost: so long the supervisor waits, once workers have failed as
        they do when a node goes. Without it 15.
    on_news     set to a function without arguments, which is then called, from any thread, whenever a command on the nodes
        has ended, so that the supervisor looks at once. Without it the supervisor looks when its sleep is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from paceline.job.job import Job
from paceline.job.plan import Command, Node, ProcessExit, RemotePaths, StartedCommand, Starter
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from paceline.runs.passage import Passage
    from paceline.runs.record import RunRecord
    from paceline.runs.remote_status import JobStatus
    from paceline.targets.status import Status

#: Told in words what a run waits for, such as "2 runs ahead"; answers whether to give up waiting.
Waiting: TypeAlias = "Callable[[str], bool]"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Nodes as a job would get them, for showing. ports: made up. starter: as in `RemotePaths`."""

    nodes: tuple[Node, ...]
    ports: tuple[int, ...]
    starter: Starter | None = None


class Nodes(Protocol):
    """The nodes that a run holds until they are closed. Not one call blocks for long, whatever a node is doing."""

    nodes: tuple[Node, ...]
    #: Free on the first node.
    ports: tuple[int, ...]

    def send(self, folder: RunFolder, library_dir: Path) -> RemotePaths:
        """Give all nodes the run's folder, or what they need of it.

        Raises:
            TargetError: it can't be had there; the message says where and why.
        """

    def shell(self, node_rank: int) -> Mapping[str, str] | None:
        """The environment that the node gives to a program; None for that of the submitting program."""

    def begin(self, attempt: int) -> None:
        """Let the nodes have the folder of an attempt, whose files come back from now on."""

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> StartedCommand:
        """Start a command on its node. shell: the environment under what the command sets.

        Raises:
            OSError: it can't be started.
        """

    def signal(self, pid: int, node_rank: int, number: int) -> bool:
        """Send a signal to a process on a node; False where it is gone."""

    def is_alive(self, pid: int, node_rank: int) -> bool:
        """True if there is such a process; on a lost node there is none."""

    def ended(self) -> list[ProcessExit]:
        """Commands that have ended since the last call. What they wrote in the run's folder is in the supervisor's by then."""

    def renew_ports(self) -> None:
        """Take other ports on the first node, in place of ones that another program has."""

    def lost(self) -> dict[int, str]:
        """Nodes that are not there any more: node rank -> how that was noticed."""

    def fetch(self) -> None:
        """Bring what is left of the run's files on the nodes into the run's folder.

        Raises:
            TargetError: some could not be had; the message says what, and where it still is.
        """

    def kill_all(self) -> None:
        """End everything that was started on the nodes, by force."""

    def oom_kills(self) -> int:
        """The number of processes that the nodes' kernels have killed for memory, as far as can be seen."""

    def is_disk_full(self) -> bool:
        """True if the run's folder, on any node, has no room for so much as a worker's report."""

    def close(self) -> None:
        """End what is left, remove what was only the run's, give the nodes back. Harmless the second time."""


class Target(Protocol):
    """Gives nodes. One object serves one run. Targets that can be configured are made with a name and settings."""

    def check(self, job: Job) -> None:
        """Refuse, before anything starts, a job that this target can never hold.

        Raises:
            TargetError: what is asked for and what there is.
        """

    def preview(self, job: Job) -> Preview:
        """Nodes as the job would get them, for showing; nothing is held."""

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Take the run's place in the queue. Called by the submitting program, so that order is order of submission."""

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        """Start the run's supervisor, detached, and hand it the open lock; its pid.

        0 where it starts elsewhere, when an engine says so (`paceline.runs.remote_status`).
        """

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        """Block until the run holds its nodes; None once `waiting` has said to give up. For the supervisor, which asks again
        after it has lost one.

        Raises:
            TargetError: the job can't have them, or not any more.
        """

    def release(self, run_dir: Path) -> None:
        """Give back the place in the queue and all that is held, where the supervisor could not. Harmless when there is
        nothing to give.
        """


@runtime_checkable
class EarlyStart(Protocol):
    """A target that can load a run's supervisor before it is known whether the job fits."""

    def load_supervisor(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Load a supervisor for the run (`supervisors.load`); called before `check`, when run_dir is not there yet.

        `start_supervisor` begins it; `release` ends it where nothing came of the submission; it ends with this program.
        """


@runtime_checkable
class Queued(Protocol):
    """A target whose engine has a queue of its own and runs the supervisor in its job."""

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        """Ask the engine how the run stands, as `paceline.runs.remote_status.Teller` says."""

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        """Ask the engine for the run's end, as `paceline.runs.remote_status.Teller` says."""

    def passage(self, folder: RunFolder) -> Passage | None:
        """The way to the supervisor for one command, where that has another folder than this one; else None."""

    def script(self, job: Job) -> str | None:
        """The text that the engine would be given, which --dry-run prints; None where there is none that could be read."""


#: The numbers of runs that are taken at once are from 0 to 999, or from 1000 to 1999, and so on.
ALIKE_SPAN = 1000


@runtime_checkable
class Alike(Protocol):
    """A target whose engine takes many runs with one call, such as a job array."""

    def start_supervisors(
        self, job: Job, run_dirs: Sequence[Path], library_dir: Path, python: str, at_once: int
    ) -> None:
        """In place of `enqueue` and `start_supervisor` for runs of jobs that differ in arguments alone.

        run_dirs: of `<parent>_<n>` with numbers that follow each other, of one `ALIKE_SPAN`. at_once: how many may run at a time.
        """


@runtime_checkable
class Controlling(Protocol):
    """A target whose engine can run a sweep's controller, so that the submitting machine may be shut down."""

    def check_controller(self) -> None:
        """Refuse a target whose engine is known not to see the workspace.

        Raises:
            TargetError: why it does not.
        """

    def start_controller(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Give the engine a job that is `python -m paceline.sweeps RUN_DIR`; `look` and `cancel` take the sweep for a run then.

        Raises:
            TargetError: the engine refuses it.
        """


@runtime_checkable
class Examined(Protocol):
    """A target that tells of its nodes, for `paceline compute` and the doctor."""

    def status(self) -> Status:
        """Its nodes, and what of them is in use.

        Raises:
            TargetError: its engine can't be reached.
        """

    def examine(self, node_count: int | None = None) -> AbstractContextManager[list[Any]]:
        """A link to each node, or `Unreachable`, while the context lasts. node_count: how many; None for the kind's own.

        Raises:
            TargetError: the nodes can't be had.
        """


@runtime_checkable
class Elastic(Protocol):
    """A target for elastic runs. Its `wait_for_nodes` takes a job with a `node_range`, and returns once as many nodes of it are
    held as can be had now. It waits for no more than the fewest.
    """

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        """How many nodes the run would be given if it gave back those that it holds, and asked anew: `nodes` and what is free
        beside them. Asked every second by the supervisor, so it does not block; what it tells may be some seconds old.
        """


#: What a target may do beyond `Target`.
PARTS: tuple[type, ...] = (EarlyStart, Queued, Alike, Controlling, Examined, Elastic)
