"""Open links to agents on all nodes of a Slurm allocation, for a run's supervisor.

    batch step on the first node     agent as a child of the supervisor: needs no step and no wait
    every other node                 srun --overlap -N1 -n1 -w NODE agent: a step that takes nothing from other steps

srun reads options from its environment, so it does not get the batch step's variables about the whole job. Workers do
not get variables of a step: with SLURM_NTASKS=1, a framework would assume a world of one process.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.errors import PacelineError, TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, port_count
from paceline.remote.addresses import Machine, choose
from paceline.remote.link import AgentNodes, Hello, Link, LinkError
from paceline.targets.base import Waiting
from paceline.targets.polling import all_within
from paceline.targets.slurm.mpi import starter
from paceline.targets.slurm.settings import SlurmSettings
from paceline.targets.slurm.states import counts, expand

#: Time limit in seconds for a step to start. slurmd and a prolog take seconds; srun waits forever for a node that is down.
OPEN_S = 60.0
#: Time limit in seconds for the start of a step on a node that has already run a step.
AGAIN_S = 8.0

#: Seconds after which a run reports a slow node. Usually Paceline's agent process starts on a node within 2 s.
_SLOW_S = 10.0
#: Variables of the batch step that srun would interpret as options.
_FOR_SRUN = frozenset(
    f"SLURM_{name}"
    for name in (
        *("CPUS_PER_TASK", "CPUS_PER_GPU", "NTASKS", "NPROCS", "TASKS_PER_NODE", "GRES", "NTASKS_PER_NODE"),
        *("NTASKS_PER_SOCKET", "NTASKS_PER_CORE", "NTASKS_PER_GPU", "NTASKS_PER_TRES", "MEM_PER_CPU", "MEM_PER_NODE"),
        *("MEM_PER_GPU", "MEM_BIND", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "GPU_BIND"),
        *("GPU_FREQ", "TRES_PER_TASK", "TRES_BIND", "DISTRIBUTION", "EXCLUSIVE", "EXACT", "WHOLE", "OVERLAP"),
        *("OVERCOMMIT", "CPU_BIND", "HINT", "EXPORT_ENV", "MPI_TYPE", "UNBUFFEREDIO", "LABELIO", "STDINMODE"),
        *("STDOUTMODE", "STDERRMODE", "WAIT", "KILL_BAD_EXIT", "TIMELIMIT", "TASK_PROLOG", "TASK_EPILOG", "PROLOG"),
        *("EPILOG", "IMMEDIATE", "OPEN_MODE", "WORKING_DIR", "REMOTE_CWD", "DEPENDENCY", "CONSTRAINT", "NODELIST"),
        *("NNODES", "JOB_NAME", "THREADS", "CORE_SPEC", "PARTITION", "ACCOUNT", "QOS", "SIGNAL", "MULTI_PROG"),
        "NETWORK",
    )
)
#: Python program that starts Paceline's agent on a node. It drops the variables of its Slurm step, then runs a line from stdin.
_AGENT = (
    "import os,sys;[os.environ.pop(k) for k in list(os.environ) if k.startswith(('SLURM','SRUN_','PMI_','PMIX_'))];"
    "exec(sys.stdin.buffer.readline())"
)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The allocation of a Slurm job, as read from the batch step's environment.

    Attributes:
        cores: Number of cores of each node, in the order of `nodes`.
        here: The name of the node on which the batch step runs.
        owners: {node: job id} of the nodes that an elastic run's second job holds.
    """

    job_id: str
    nodes: tuple[str, ...]
    cores: tuple[int, ...]
    here: str
    restarts: int = 0
    owners: Mapping[str, str] = field(default_factory=dict)

    def extended(self, names: Sequence[str], job_id: str, cores: int) -> Allocation:
        """Return this allocation with the nodes of another Slurm job added."""
        more = [name for name in names if name not in self.nodes]
        # Add only new names: the second job may have got a node that the first job has lost, and that is still in `self.nodes`.
        return replace(
            self,
            nodes=(*self.nodes, *more),
            cores=(*self.cores, *[cores] * len(more)),
            owners=dict.fromkeys(names, job_id),
        )

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation:
        """Return this process's Slurm allocation. Raise TargetError outside of an allocation."""
        job_id = environment.get("SLURM_JOB_ID")
        listed = environment.get("SLURM_JOB_NODELIST")
        if not job_id or not listed:
            raise TargetError(
                "this program is not in a job of Slurm's: SLURM_JOB_ID or SLURM_JOB_NODELIST is not set. "
                "The batch script that Slurm runs starts the supervisor; `paceline submit` hands it over."
            )
        nodes = expand(listed)
        cores = counts(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return cls(
            job_id=job_id,
            nodes=tuple(nodes),
            cores=tuple(cores) if len(cores) == len(nodes) else (0,) * len(nodes),
            here=environment.get("SLURMD_NODENAME", nodes[0]),
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
        )


def open_nodes(
    allocation: Allocation,
    job: Job,
    settings: SlurmSettings,
    library_dir: Path,
    waiting: Waiting,
    *,
    limit_s: float = OPEN_S,
) -> AgentNodes | None:
    """Return nodes with an agent on each; None if `waiting` cancels the wait.

    Raises:
        LinkError: A node failed; the message names it.
        TargetError: The nodes have no common network, or srun, which the workers need, is missing.
    """
    names = allocation.nodes if job.node_range else allocation.nodes[: job.node_count]
    environment, folder = step_environment(os.environ), f"/tmp/paceline-{_user()}"

    def opened(name: str) -> Link:
        return Link.open(
            link_words(allocation, name),
            name=name,
            library_dir=library_dir,
            folder=folder,
            shared_library=True,
            env=environment,
            timeout_s=limit_s,
            silence_s=settings.silence_s,
        )

    links = _open_all(names, opened, waiting, least=job.least_nodes)
    if links is None:
        return None
    try:
        _close_all(links[job.node_count :])
        links = links[: job.node_count]
        names = tuple(link.name for link in links)
        nodes = _nodes(allocation, names, [link.hello for link in links], settings, job)
        ports = tuple(links[0].free_ports(port_count(job)))
        return AgentNodes(
            links,
            nodes,
            ports,
            folder=folder,
            python=settings.python or sys.executable,
            starter=starter(job, settings, allocation.job_id, names, os.environ),
        )
    except BaseException:
        _close_all(links)
        raise


def link_words(allocation: Allocation, node: str, *, python: str | None = None) -> list[str]:
    """Return the command line that starts a node's agent, using srun unless local."""
    agent = [python or sys.executable, "-S", "-c", _AGENT]
    # On this process's own node, start Paceline's agent as a child process, without a Slurm step.
    job_id = allocation.owners.get(node, allocation.job_id)
    return agent if node == allocation.here else [*srun_words(job_id, node), *agent]


def srun_words(job_id: str, node: str) -> list[str]:
    """Return the srun command line for a step with a node's cores and GPUs."""
    return [
        *("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mem=0"),
        # Paceline's agent process sends binary messages. Switch srun's buffering off, because it forwards only complete lines.
        "--unbuffered",
        *("--cpu-bind=none", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", "--job-name=paceline-agent"),
        # Without this limit, srun waits forever for a node with a full queue of steps.
        "--immediate=30",
    ]


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun and of the agents.

    Variables about the whole job are left out, and PYTHONPATH is the user's, not the supervisor's.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _FOR_SRUN and not name.startswith(("SRUN_", "SLURM_STEP_", "SLURM_HET_"))
    }
    # Remove the batch script's PYTHONPATH, which names Paceline's own folder, so that user scripts do not see it.
    kept.pop("PYTHONPATH", None)
    if theirs := kept.pop("PACELINE_SHELL_PYTHONPATH", ""):
        kept["PYTHONPATH"] = theirs
    return kept


def _open_all(
    names: Sequence[str], opened: Callable[[str], Link], waiting: Waiting, *, least: int
) -> list[Link] | None:
    """Open links to all nodes in parallel; None if `waiting` cancels the wait.

    least: Once this number of links is open, wait only `AGAIN_S` seconds for the other links.
    """
    found: dict[str, Link] = {}
    # Hold the lock `deciding` to use `found` or `is_over`. Once `is_over` is set, each thread closes the link that it opens.
    is_over, deciding = threading.Event(), threading.Lock()
    errors: dict[str, PacelineError] = {}

    def open_one(name: str) -> None:
        try:
            link = opened(name)
        except PacelineError as error:
            errors[name] = error
            return
        with deciding:
            is_late = is_over.is_set()
            if not is_late:
                found[name] = link
        if is_late:
            link.close()  # the run starts without this node

    # Open each node's link in a daemon thread, so that a hanging srun does not keep this process alive.
    threads = [threading.Thread(target=open_one, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    gives_up, began, enough_at = False, time.monotonic(), float("inf")
    while any(thread.is_alive() for thread in threads) and not gives_up:
        left = [name for name in names if name not in found and name not in errors]
        gives_up = waiting(_starts_on(left, time.monotonic() - began))
        # Check every 0.1 s, because `waiting` must notice a cancellation soon.
        deadline = time.monotonic() + 0.1
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if least <= len(found) < len(names):
            enough_at = min(enough_at, time.monotonic())
            if time.monotonic() - enough_at > AGAIN_S:
                break
    if not gives_up and least < len(names) and least <= len(found):
        with deciding:
            is_over.set()
        return [found[name] for name in names if name in found]
    # If a node is missing, close all links. Don't wait for the threads that still open links, because they end with this process.
    if gives_up or errors:
        for thread in threads:
            thread.join(1.0)
        _close_all(list(found.values()))
        if gives_up:
            return None
        raise next(errors[name] for name in names if name in errors)
    return [found[name] for name in names]


def _starts_on(left: Sequence[str], for_s: float) -> str:
    """Return a run's status text while it waits for the nodes `left`."""
    shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
    if not left:
        return "starts"
    if for_s < _SLOW_S:
        return f"starts on {shown}"
    return f"waits for {shown} to answer: down, or cut off? Slurm takes a lost node away after its SlurmdTimeout"


def _close_all(links: Sequence[Link]) -> None:
    all_within({link.name: link.close for link in links}, 10.0)


def _nodes(
    allocation: Allocation, names: Sequence[str], hellos: Sequence[Hello], settings: SlurmSettings, job: Job
) -> tuple[Node, ...]:
    places = common_addresses(names, hellos, settings.interface)
    cores = dict(zip(allocation.nodes, allocation.cores, strict=True))
    return tuple(
        Node(
            node_rank=rank,
            name=name,
            address=address,
            # Use the allocation's number of cores. The agent process is not bound to cores, so it reports all cores of its node.
            cores=max(1, cores.get(name) or hello.cores),
            gpus=hello.gpus if job.use_gpu else (),
            interface=interface,
        )
        for rank, (name, hello, (address, interface)) in enumerate(zip(names, hellos, places, strict=True))
    )


def common_addresses(
    names: Sequence[str], hellos: Sequence[Hello], interface: str | None
) -> list[tuple[str, str | None]]:
    """Return the (address, interface) at which each node is reachable for other nodes.

    Use the configured `interface`. Without it, use the address to which the node's name resolves.

    Raises:
        TargetError: A node lacks the configured interface, or has no address that other nodes reach.
    """
    if interface is None and len(names) == 1:
        return [("127.0.0.1", "lo")]
    machines = [
        Machine(name=name, interfaces=hello.interfaces, arrived_at=_named_address(name, hello))
        for name, hello in zip(names, hellos, strict=True)
    ]
    found = choose(machines, interface)
    for machine, (_, its_interface) in zip(machines, found, strict=True):
        if its_interface is None:
            there = ", ".join(f"{name} {address}" for name, (address, _) in machine.interfaces.items()) or "none"
            raise TargetError(f"node {machine.name} has no IPv4 address that other nodes can reach; it has {there}.")
    return found


def _named_address(name: str, hello: Hello) -> str:
    own = {address for address, _ in hello.interfaces.values()}
    for host in (name, hello.host):
        with contextlib.suppress(OSError):
            for info in socket.getaddrinfo(host, None, socket.AF_INET):
                address = str(info[4][0])
                # Skip loopback addresses: Debian resolves a machine's own name to 127.0.1.1.
                if address in own and not address.startswith("127."):
                    return address
    return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


__all__ = [
    "AGAIN_S",
    "OPEN_S",
    "Allocation",
    "LinkError",
    "common_addresses",
    "link_words",
    "open_nodes",
    "srun_words",
    "step_environment",
]
