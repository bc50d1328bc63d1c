"""Define the types that targets and launchers exchange: nodes, slots, commands.

A target returns `Node`s; preparing a node results in a `NodeSetup`; a job has one `RankSlot` per worker; a launcher turns slots
into `Command`s, which the target starts. Targets and launchers never import each other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.job.job import Job

#: Variable with the path of a Python in the container, which runs the remote shell's program there.
REMOTE_SHELL_PYTHON = "PACELINE_REMOTE_SHELL_PYTHON"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of a run, or one of several simulated on target `local`.

    Attributes:
        address: Host name or IP address by which the other nodes reach the node.
        cores: Cores that the run may use on the node, at least 1.
        gpus: GPUs that the run leases, as in `CUDA_VISIBLE_DEVICES`.
        interface: Network interface with `address`, or None if unknown.
        network: Network of `address`, such as "10.0.0.0/24", or None if unknown.
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
    """The results of preparing a node for its workers.

    Attributes:
        python: The script's interpreter.
        variables: Variables of the interpreter's environment, such as `VIRTUAL_ENV`.
        bin_dir: Folder with the environment's programs, put first on PATH; None leaves PATH unchanged.
        is_isolated: Whether workers ignore the shell's PYTHONPATH and the user's own packages.
        inputs: Name of an input -> its folder or file on the node.
        inputs_by_rank: Names of inputs that have a folder `rank_<rank>` for each worker.
        container: Engine, image and mounts of the workers' containers, or None without containers.
        open_mpi: Path and version (major, minor) of the image's mpirun, or None.
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
        """Return the path of an input for one worker."""
        return f"{self.inputs[name]}/rank_{rank}" if name in self.inputs_by_rank else self.inputs[name]


@dataclass(frozen=True, kw_only=True)
class RankSlot:
    """The ranks of one worker: in the run and on its node.

    Attributes:
        role: "worker", or "ps" for a TensorFlow parameter server.
        index: Position among the workers of the same role, from 0.
    """

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    role: str = "worker"
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A program that starts MPI's workers instead of mpirun, such as Slurm's srun.

    Attributes:
        argv: Command line of the program, to which a worker's command line is appended. The program starts each worker
            on its node, in order of rank, with PMIx.
        environment: Variables for the program itself, not for its workers.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return Path(self.argv[0]).name


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The data on one attempt that a launcher needs.

    Attributes:
        run_dir: The run's folder on the nodes.
        work_dir: The workers' working directory.
        scratch_dir: A folder with a short path, for sockets and shared memory. The nodes remove it at the run's end.
        library_dir: A folder that contains only the package `paceline`.
        prepared: The setup of each node, by node rank.
        ports: `port_count(job)` free ports on the first node: for torch's rendezvous, for JAX's coordinator, then for each
            rank's TensorFlow server.
        remote_shell: A command that takes `HOST COMMAND...` like ssh; empty if all nodes are one machine.
        starter: The program that starts MPI's workers, or None for mpirun.
        ends_at: Unix time at which the run's time limit ends, or None.
        secret: Hexadecimal key with which the ranks sign messages; empty if nothing is started, as with --dry-run.
        spare: Path prefix of the files of a node's warm spare (a process that forks workers); `%` is the node's rank. Or "".
        states_key: Hexadecimal key for copying training states to other nodes' memory; empty without copies.
        source_dir: The folder with the run's copy of the source, or None if it is `work_dir`.
        original_dir: The user's source folder if the copy has links to it, otherwise None.
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
    spare: str = ""
    states_key: str = field(default="", repr=False)
    source_dir: Path | None = None
    original_dir: Path | None = None

    @functools.cached_property
    def places(self) -> tuple[RankSlot, ...]:
        """The ranks and role of each worker, in order of rank."""
        return places(self.job)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line that a target starts on one node.

    Attributes:
        environment: Variables to set.
        defaults: Variables to set unless the node's shell has them.
        ranks: The workers that the command runs.
        is_launcher: True if the command starts several workers (mpirun), which report their ends themselves; False if it is
            a worker.
        log: File to which output and errors are appended.
        spare: Path prefix of the files of the node's warm spare (a process that may fork this worker). Empty without spares.
        is_spare: Whether the command is a warm spare, which outlives attempts.
        shells: For each other node, the command that starts a shell in the node's container. mpirun's remote shell appends a
            command line to it. Empty without containers: the remote shell then uses `/bin/sh -c`.
    """

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    node_rank: int = 0
    ranks: tuple[int, ...] = (0,)
    is_launcher: bool = False
    log: Path
    spare: str = ""
    is_spare: bool = False
    shells: tuple[Command, ...] = ()


def places(job: Job) -> tuple[RankSlot, ...]:
    """Return one slot per worker: consecutive ranks share a node, evenly over the nodes.

    Parameter servers have the last ranks.
    """
    per_node, left = divmod(job.world_size, job.node_count)
    workers = job.world_size - job.parameter_server_count
    result: list[RankSlot] = []
    for node_rank in range(job.node_count):
        # If the workers can't be divided evenly, each of the first nodes takes one worker more.
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
    """Return the number of workers on each node, in order of node rank."""
    sizes = [0] * job.node_count
    for place in places(job):
        sizes[place.node_rank] += 1
    return sizes


def port_count(job: Job) -> int:
    """Return the number of ports that an attempt needs on its first node."""
    # Count one port for torch and one for JAX, because it is unknown which of them the script imports.
    return 2 + (job.world_size if job.uses_tf_config else 0)


def preview_ports(job: Job) -> tuple[int, ...]:
    """Return example ports to show with --dry-run, from torch's default on."""
    return tuple(range(29500, 29500 + port_count(job)))


@dataclass(frozen=True, kw_only=True)
class StartedCommand:
    """A running command. cold: why a preloaded process (warm spare) did not fork it, or ""."""

    command: Command
    pid: int
    cold: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """A command's exit code as in a shell, and peak memory in bytes (0: unknown)."""

    pid: int
    node_rank: int
    exit_code: int
    time: float
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RemotePaths:
    """A run's folders, with the same paths on each of its nodes.

    Attributes:
        work_dir: The workers' working directory.
        python: The default interpreter.
        is_shared: Whether the nodes share the supervisor's folders. Otherwise each node creates them from the snapshot that
            it received.
        sees_source: Whether the nodes have the user's source folder, to which links may lead.
        remote_shell: A command that takes `HOST COMMAND...` like ssh and runs it on another node; may be empty.
        starter: The program that starts MPI's workers, or None for mpirun.
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
