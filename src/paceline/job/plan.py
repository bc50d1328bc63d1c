"""The types that targets and launchers pass to each other: nodes, places, commands.

A target gives `Node`s; what runs once on each node before the workers leaves one `NodeSetup`; a job and its nodes give
one `RankSlot` per worker; a launcher turns places into `Command`s; the target starts those. Targets and launchers never
import each other: this is all they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.job.job import Job

#: Names the interpreter that the remote shell's program runs with, where the nodes' own is not to be seen: in a container.
REMOTE_SHELL_PYTHON = "PACELINE_REMOTE_SHELL_PYTHON"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of a run, or its stand-in on `local`.

    address: what other nodes reach it by.
    cores: cores that the run may use there, at least 1.
    gpus: the devices leased to the run there, as `CUDA_VISIBLE_DEVICES` spells them.
    interface, network: the network interface that has `address`, and its network ("10.0.0.0/24"), where they are known.
    """

    node_rank: int
    name: str
    address: str
    cores: int
    gpus: tuple[str, ...] = ()
    interface: str | None = None
    network: str | None = None


@dataclass(frozen=True, kw_only=True)
class NodeSetup:
    """The things that a node has ready for its workers.

    python: the interpreter that runs the script. variables: that its environment needs (`VIRTUAL_ENV`).
    bin_dir: of the environment's programs, put first on PATH, several of them as PATH has them; None leaves PATH as it is.
    is_isolated: the shell's PYTHONPATH does not count, nor what the user has installed for themselves.
    inputs: name -> folder or file, as the node sees it. inputs_by_rank: names of those that have a folder
        `rank_<rank>` for each worker.
    container: where the workers run in containers, what is needed to start them: engine, image, mounts.
    open_mpi: path and version (major, minor) of that image's mpirun; None where it has none.
    """

    python: str
    variables: Mapping[str, str] = field(default_factory=dict)
    bin_dir: str | None = None
    is_isolated: bool = False
    inputs: Mapping[str, str] = field(default_factory=dict)
    inputs_by_rank: tuple[str, ...] = ()
    container: Mapping[str, Any] | None = None
    open_mpi: tuple[str, tuple[int, int]] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NodeSetup:
        values = {**data, "inputs_by_rank": tuple(data.get("inputs_by_rank") or ())}
        if found := data.get("open_mpi"):
            values["open_mpi"] = (found[0], (found[1][0], found[1][1]))
        return cls(**values)

    def input_path(self, name: str, rank: int) -> str:
        """The path at which a worker finds an input."""
        return f"{self.inputs[name]}/rank_{rank}" if name in self.inputs_by_rank else self.inputs[name]


@dataclass(frozen=True, kw_only=True)
class RankSlot:
    """The place of one worker. role: "worker" or, for TensorFlow's parameter servers, "ps"; index: within its role."""

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    role: str = "worker"
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A program of an engine's own that starts MPI's workers in mpirun's place: the command line that is put behind its own
    once for each worker, each on the node of its place, in order of rank, with PMIx.

    environment: what it needs itself; its workers do not see it.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return Path(self.argv[0]).name


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that a launcher is told of one attempt.

    run_dir: the run's folder as the nodes see it.
    work_dir: the workers' working directory. source_dir: the private copy of the snapshot; None where that is `work_dir`.
    original_dir: what that is a copy of, where its links lead there.
    prepared: one for each node.
    library_dir: a folder that holds `paceline` alone, for the worker's side.
    ports: free ports on the first node, `port_count(job)` of them: torch's rendezvous, JAX's coordinator, then one per
        rank for TensorFlow's servers.
    scratch_dir: a short path for the launcher's own sockets and shared memory; the nodes remove it.
    remote_shell: takes `HOST COMMAND...` as ssh does; empty where all nodes are one machine (`REMOTE_SHELL_PYTHON`).
    starter: what starts MPI's workers; None for mpirun.
    ends_at: when the run's time is up, in Unix seconds; None without a limit.
    secret: what the attempt's ranks sign with, as hexadecimal digits; empty where nothing is to be started.
    """

    job: Job
    run_id: str
    experiment: str
    workspace_name: str
    run_dir: Path
    work_dir: Path
    scratch_dir: Path
    library_dir: Path
    nodes: tuple[Node, ...]
    prepared: tuple[NodeSetup, ...]
    ports: tuple[int, ...]
    attempt: int = 1
    remote_shell: tuple[str, ...] = ()
    starter: Starter | None = None
    ends_at: float | None = None
    secret: str = field(default="", repr=False)
    source_dir: Path | None = None
    original_dir: Path | None = None

    @property
    def places(self) -> tuple[RankSlot, ...]:
        """One place per worker, in order of rank."""
        return places(self.job)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line that a target starts on one node.

    ranks: the workers that it runs. is_launcher: it starts them (mpirun), and each reports its own end; else it is the
        one worker itself.
    environment: set for it, whatever the node has. defaults: set where the node's environment has nothing of that name.
    log: file for standard output and error, appended to.
    shells: what takes, on a node each, a command line of its remote shell as one more word; `/bin/sh -c` on nodes that have
        none here.
    """

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    node_rank: int = 0
    ranks: tuple[int, ...] = (0,)
    is_launcher: bool = False
    log: Path
    shells: tuple[Command, ...] = ()


def places(job: Job) -> tuple[RankSlot, ...]:
    """One place per worker of `job`, in order of rank: consecutive ranks share a node, node sizes differ by one at most.

    Parameter servers take the last ranks.
    """
    per_node, left = divmod(job.world_size, job.node_count)
    workers = job.world_size - job.parameter_server_count
    result: list[RankSlot] = []
    for node_rank in range(job.node_count):
        # What is left over goes to the first nodes, one worker to each.
        size = per_node + (node_rank < left)
        for local_rank in range(size):
            rank = len(result)
            is_worker = rank < workers
            result.append(
                RankSlot(
                    rank=rank,
                    node_rank=node_rank,
                    local_rank=local_rank,
                    local_world_size=size,
                    role="worker" if is_worker else "ps",
                    index=rank if is_worker else rank - workers,
                )
            )
    return tuple(result)


def node_sizes(job: Job) -> list[int]:
    """The number of workers of `job` that each node gets, in order of node rank."""
    sizes = [0] * job.node_count
    for place in places(job):
        sizes[place.node_rank] += 1
    return sizes


def port_count(job: Job) -> int:
    """The number of ports that an attempt of `job` needs on its first node."""
    # Torch's and JAX's ports are always there: which of them the script imports is not known before it runs.
    return 2 + (job.world_size if job.uses_tf_config else 0)


def preview_ports(job: Job) -> tuple[int, ...]:
    """Ports as a preview of a run shows them, from torch's own default on; those of a run are found on its first node."""
    return tuple(range(29500, 29500 + port_count(job)))


@dataclass(frozen=True, kw_only=True)
class StartedCommand:
    """A command that runs. pid: on its node."""

    command: Command
    pid: int


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """A command that has ended. exit_code: as a shell gives it, 128+n for signal n; time: seconds since the epoch.
    peak_bytes: what its process had in memory at most; 0 where nobody has counted.
    """

    pid: int
    node_rank: int
    exit_code: int
    time: float
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RemotePaths:
    """A run's folders as its nodes see them, the same paths on each.

    work_dir: the workers' working directory. is_shared: these are the supervisor's own folders, so `work_dir` can be
        made there; otherwise each node makes its own from the snapshot that was sent. sees_source: the nodes have the user's
        folder that was copied, too, so links may lead there.
    python: the interpreter of nodes whose job names none. remote_shell: takes `HOST COMMAND...` as ssh does and runs it on
        another node of the run; empty where there is no such thing. starter: what starts MPI's workers in mpirun's place.
    """

    run_dir: Path
    work_dir: Path
    scratch_dir: Path
    library_dir: Path
    python: str
    is_shared: bool = True
    sees_source: bool = True
    remote_shell: tuple[str, ...] = ()
    starter: Starter | None = None
