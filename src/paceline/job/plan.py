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

#: Variable with the path of a Python inside a container that runs the remote shell's program, as the node's is not visible.
REMOTE_SHELL_PYTHON = "PACELINE_REMOTE_SHELL_PYTHON"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of a run, or one of several simulated on target `local`.

    address: for the other nodes. cores: cores that the run may use there, at least 1. gpus: leased devices, as in
    `CUDA_VISIBLE_DEVICES`. interface, network: the network interface with `address`, and its network ("10.0.0.0/24"), if known.
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
    """The results of preparing a node, which its workers need.

    python: the script's interpreter. variables: for its environment (`VIRTUAL_ENV`). bin_dir: folders of the environment's
    programs, put first on PATH; None leaves PATH. is_isolated: ignore the shell's PYTHONPATH and the user's own packages. inputs:
    name -> folder or file on the node. inputs_by_rank: names of inputs with a folder `rank_<rank>` for each worker. container:
    engine, image and mounts, if the workers run in containers. open_mpi: path and version (major, minor) of that image's mpirun,
    or None.
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
        """Return a worker's path of an input."""
        return f"{self.inputs[name]}/rank_{rank}" if name in self.inputs_by_rank else self.inputs[name]


@dataclass(frozen=True, kw_only=True)
class RankSlot:
    """The position of one worker. role: "worker", or "ps" for a TensorFlow parameter server; index: within its role."""

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    role: str = "worker"
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Starter:
    """An engine's own program that starts MPI's workers instead of mpirun.

    argv: its command line, to which the worker's command line is appended. It starts each worker on its node, in order of rank,
    with PMIx. environment: variables for the program itself, not for its workers.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return Path(self.argv[0]).name


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All facts on one attempt that a launcher needs.

    run_dir: the run's folder on the nodes. work_dir: the workers' working directory. source_dir: the copy of the source; None if
    it is `work_dir`. original_dir: the user's folder, if the copy has links to it. prepared: one for each node. library_dir: has
    only `paceline`. ports: `port_count(job)` free ports on the first node: torch's rendezvous, JAX's coordinator, then one per
    rank for TensorFlow's servers. scratch_dir: a short path for sockets and shared memory; the nodes remove it. remote_shell: a
    command that takes `HOST COMMAND...` like ssh; empty if all nodes are one machine. starter: starts MPI's workers instead of
    mpirun. ends_at: Unix time of the time limit, or None. secret: hexadecimal key with which the ranks sign messages;
    empty for a preview. spare: path of a node's warm spare, with `%` for the node's rank; empty without spares.
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
    source_dir: Path | None = None
    original_dir: Path | None = None

    @functools.cached_property
    def places(self) -> tuple[RankSlot, ...]:
        """One slot per worker, in order of rank."""
        return places(self.job)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line that a target starts on one node.

    ranks: the workers that the command runs. is_launcher: whether it starts these workers (mpirun), which report their ends
    themselves; otherwise it is a single worker. environment: variables to set. defaults: variables to set unless the node has
    them. log: file to which output and errors are appended. spare: path of the node's warm spare, which may fork this worker.
    is_spare: whether the command is such a spare, which outlives attempts. shells: for each node, the command that runs a
    command line from the remote shell, given as its last word; default: `/bin/sh -c`.
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
        # If the workers don't divide evenly, each of the first nodes takes one more.
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
    # Always count torch's and JAX's ports: which of them the script imports is unknown.
    return 2 + (job.world_size if job.uses_tf_config else 0)


def preview_ports(job: Job) -> tuple[int, ...]:
    """Return example ports for a preview, starting with torch's default."""
    return tuple(range(29500, 29500 + port_count(job)))


@dataclass(frozen=True, kw_only=True)
class StartedCommand:
    """A running command. cold: why the node's warm spare did not fork it."""

    command: Command
    pid: int
    cold: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The end of a command. exit_code: as a shell reports it; peak_bytes: peak memory, or 0."""

    pid: int
    node_rank: int
    exit_code: int
    time: float
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RemotePaths:
    """A run's folders on its nodes, the same paths on each.

    work_dir: the workers' working directory. is_shared: whether the nodes share the supervisor's folders; otherwise each node
    creates them from the snapshot that it got. sees_source: whether the nodes have the user's folder, to which links may lead.
    python: the default interpreter. remote_shell: a command that takes `HOST COMMAND...` like ssh and runs it on another node;
    may be empty. starter: starts MPI's workers instead of mpirun.
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
