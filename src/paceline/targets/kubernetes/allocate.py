"""Wait in a run's pod 0 for its other pods, and link to their agents."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, port_count
from paceline.remote.link import AgentNodes, Link, LinkError, bootstrap_words
from paceline.remote.link.bootstrap import Ends
from paceline.system.processes import SUPERVISOR_VARIABLE, shell_environment
from paceline.targets.base import Waiting
from paceline.targets.kubernetes.manifests import ADDRESS_VARIABLE, TOP
from paceline.targets.kubernetes.settings import KubernetesSettings
from paceline.targets.kubernetes.ticket import HUB_SOCKET, TICKET_VARIABLE, Noted, PodTicket, message

_TICK_S = 0.05
_OWN_VARIABLES = (TICKET_VARIABLE, SUPERVISOR_VARIABLE, ADDRESS_VARIABLE)
_LINK_S = 30.0
#: Seconds that an elastic run waits for additional pods once it has its minimum number of pods.
_SETTLE_S = 2.0


class PodGathering:
    """A run's connected pods, which the supervisor uses as nodes."""

    def __init__(self, ticket: PodTicket) -> None:
        self._ticket = ticket
        self._hub = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._hub.connect(HUB_SOCKET)
        #: Index of a connected pod that no attempt uses yet -> the pod's socket and description.
        self._pods: dict[int, tuple[socket.socket, Noted]] = {}
        #: Indexes of pods that Kubernetes is ending.
        self.leaving: set[int] = set()
        self._guard = threading.Lock()
        threading.Thread(target=self._hear, name="paceline-pods", daemon=True).start()

    @property
    def count(self) -> int:
        """The number of connected pods, without the supervisor's own pod."""
        return len(self._pods)

    def wait(self, job: Job, held: int, waiting: Waiting) -> bool:
        """Wait until the run has enough pods. Return False once `waiting` returns True.

        held: Number of pods that the run has already.

        If too few pods have connected after `gang_wait_s`, end all pods once, which frees their nodes. Kubernetes
        starts the pods again, after a pause that grows each time.
        """
        began, enough_at = time.monotonic(), float("inf")
        # Choose the time limit at random. Otherwise two runs that block each other could always retry together.
        limit_s = self._ticket.gang_wait_s * random.uniform(1.0, 1.3)
        gave_back = False
        while self.count + held < job.node_count and time.monotonic() - enough_at < _SETTLE_S:
            if self.count + held >= job.least_nodes:
                enough_at = min(enough_at, time.monotonic())
            if waiting(f"{self.count + held} of {job.node_count} pods"):
                return False
            if time.monotonic() - began > limit_s and not gave_back and self.count + held < job.least_nodes:
                gave_back = True
                self._hub.send(message({"give_back": True}))
            time.sleep(_TICK_S)
        return True

    def take(self, count: int) -> dict[int, tuple[socket.socket, Noted]]:
        """Remove up to `count` connected pods, and return them by index."""
        with self._guard:
            chosen = sorted(self._pods)[:count]
            return {index: self._pods.pop(index) for index in chosen}

    def leave_reason(self, names: Mapping[int, str]) -> str:
        """Return a text that names the pods being ended by Kubernetes, or ""."""
        gone = [name for index, name in names.items() if index in self.leaving]
        return f"Kubernetes ends pod {', '.join(gone)}: an eviction, a preemption or a drained node" if gone else ""

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, fds, _, _ = socket.recv_fds(self._hub, 1 << 14, 1)
                if not data:
                    return
                told = json.loads(data)
                index = int(told["rank"])
                if told.get("leaving"):
                    self.leaving.add(index)
                    continue
                with self._guard:
                    earlier = self._pods.pop(index, None)
                    self._pods[index] = (socket.socket(fileno=fds[0]), told)
                self.leaving.discard(index)
                if earlier is not None:
                    earlier[0].close()


def ticket() -> PodTicket:
    """Return the ticket (description) of the run that this process supervises.

    Raises:
        TargetError: This process is not a supervisor in a pod.
    """
    path = os.environ.get(TICKET_VARIABLE)
    if path is None:
        raise TargetError(
            f"nodes of a Kubernetes cluster are only available inside a pod, and {TICKET_VARIABLE} is not set."
        )
    return PodTicket.read(path)


def gather(
    gathering: PodGathering, job: Job, settings: KubernetesSettings, library: Path, waiting: Waiting
) -> AgentNodes | None:
    """Return the run's pods as nodes, or None once `waiting` returns True.

    Raises:
        EngineError: The agent of this pod does not start.
        TargetError: A pod has GPUs that its container does not see.
    """
    with contextlib.ExitStack() as undo:
        shell = {name: text for name, text in shell_environment().items() if name not in _OWN_VARIABLES}
        own = Ends.of_program(bootstrap_words(sys.executable), shell, socket.gethostname())
        links = {0: open_link(own, socket.gethostname(), library, settings.silence_s)}
        undo.callback(links[0].close)
        told: dict[int, Noted] = {0: {"address": os.environ.get(ADDRESS_VARIABLE) or "127.0.0.1"}}
        while len(links) < job.least_nodes or (len(links) < job.node_count and gathering.count):
            if not gathering.wait(job, len(links), waiting):
                return None
            taken = gathering.take(job.node_count - len(links))

            def opens(pod: tuple[socket.socket, Noted]) -> Link | None:
                with contextlib.suppress(LinkError):
                    return open_link(Ends.of_socket(pod[0]), str(pod[1]["hostname"]), library, settings.silence_s)
                return None

            with ThreadPoolExecutor(max(1, len(taken))) as pool:
                opened = pool.map(opens, taken.values())
            for index, link in zip(taken, opened, strict=True):
                if link is not None:
                    undo.callback(link.close)
                    links[index], told[index] = link, taken[index][1]
        nodes = _nodes(links, told, job, settings)
        names = {index: node.name for index, node in zip(sorted(links), nodes.nodes, strict=True)}
        nodes.leave_reason = lambda: gathering.leave_reason(names)
        undo.pop_all()
    return nodes


def open_link(ends: Ends, name: str, library: Path, silence_s: float) -> Link:
    """Return a connection to Paceline's process (agent) in a pod."""
    # The agent finds Paceline's library below the folder `TOP`, where `boot.py` has unpacked it.
    return Link.over(ends, name=name, library_dir=library, folder=TOP, timeout_s=_LINK_S, silence_s=silence_s)


def _nodes(links: Mapping[int, Link], told: Mapping[int, Noted], job: Job, settings: KubernetesSettings) -> AgentNodes:
    cores = max(1, int(settings.cpus_per_worker * job.process_count_per_node))
    wanted = settings.gpus_per_worker * job.process_count_per_node
    nodes = []
    for rank, index in enumerate(sorted(links)):
        hello = links[index].hello
        if job.use_gpu and len(hello.gpus) < wanted:
            raise TargetError(
                f"pod {links[index].name} has {wanted} of {settings.gpu_resource}, but its container sees {len(hello.gpus)}: "
                "the node's driver is not in it. Set runtime_class (often nvidia), or ask the cluster's administrator."
            )
        address = str(told[index]["address"]) if len(links) > 1 else "127.0.0.1"
        gpus = hello.gpus[:wanted] if job.use_gpu else ()
        nodes.append(Node(node_rank=rank, name=links[index].name, address=address, cores=cores, gpus=gpus))
    ordered = [links[index] for index in sorted(links)]
    python = None if os.sep not in settings.python else settings.python
    # With a volume, each pod uses its own copy of the run at one path, because environments on the volume contain that path.
    is_shared = False if settings.volume else None
    return AgentNodes(ordered, tuple(nodes), port_count(job), folder=TOP, python=python, is_shared=is_shared)
