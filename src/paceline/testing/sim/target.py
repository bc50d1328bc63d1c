"""The compute target `sim`: a cluster of simulated nodes, to test jobs and Paceline at any size."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, port_count, preview_ports
from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.link import Link
from paceline.remote.link.nodes import AgentNodes
from paceline.system import processes
from paceline.targets import supervisors
from paceline.targets.base import Nodes, Preview, Waiting
from paceline.targets.options import Option, SettingValues
from paceline.testing.sim.faults import BATCH, OPTIONS, SimSettings
from paceline.testing.sim.node import DISK

#: Time limit in seconds for all simulated agents to send their first message; time limit for their processes to end.
_HELLO_S, _END_S = 120.0, 10.0


class SimTarget:
    """A compute target with simulated nodes. Each run gets new nodes at once."""

    kind: ClassVar[str] = "sim"
    OPTIONS: ClassVar[tuple[Option, ...]] = OPTIONS

    def __init__(self, name: str = kind, settings: SettingValues | None = None) -> None:
        self.name, self.settings = name, dict(settings or {})
        self._set = SimSettings.read(self.kind, name, self.settings)
        #: Indexes of nodes that failed in earlier attempts. A new attempt uses these nodes only if too few other nodes are left.
        self._gone: set[int] = set()
        self._round = 0

    def check(self, job: Job) -> None:
        most = self._set.nodes
        if job.least_nodes > most:
            raise TargetError(
                f"node_count={job.least_nodes}, but compute target {self.name!r} simulates "
                f"{most} nodes. Ask for at most {most}, or set nodes."
            )
        if job.use_gpu or job.launcher == "mpi" or job.inputs or not job.is_python:
            raise TargetError(
                f"compute target {self.name!r} simulates Python workers without GPUs, mpirun and data: it plays the list "
                "EVENTS of the script. Choose distributed_backend='gloo', use_gpu=False and no inputs."
            )
        if job.environment.needs_build or job.environment.docker_image:
            raise TargetError(f"compute target {self.name!r} runs nothing in an environment. Leave it out.")

    def preview(self, job: Job) -> Preview:
        return Preview(nodes=self._nodes(range(job.node_count)), ports=preview_ports(job))

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Do nothing, since no run waits for nodes."""

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        return supervisors.start(run_dir, lock_fd, library_dir, python)

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        fit = [number for number in range(self._set.nodes) if number not in self._gone]
        numbers = (fit if len(fit) >= job.node_count else range(self._set.nodes))[: job.node_count]
        disk = None if self._set.shared else tempfile.mkdtemp(prefix=f"paceline-{run_dir.name[-8:]}-sim")
        behaviors = self._set.behaviors(numbers, has_faults=self._round == 0)
        self._round += 1
        processes.raise_open_files()
        started: list[subprocess.Popen[bytes]] = []
        pairs: list[tuple[Link, Ends]] = []
        for part in range(self._set.processes):
            mine = numbers[part :: self._set.processes]
            told = {
                "numbers": list(mine),
                "behaviors": {number: dataclasses.asdict(behaviors[number]) for number in mine},
                "disk": disk,
                **{name: getattr(self._set, name) for name in ("seed", "cores", "silence_s")},
            }
            process, sockets = _simulate(told)
            started.append(process)
            for number, sock in zip(mine, sockets, strict=True):
                ends = Ends.of_socket(sock)
                pairs.append((Link(ends, f"sim{number}", self._set.silence_s), ends))
        pairs.sort(key=lambda pair: int(pair[0].name[3:]))
        for link, _ in pairs:
            link.begin()
        links = [link for link, _ in pairs]
        close = functools.partial(self._close, started, links, disk)
        try:
            for link, ends in pairs:
                link.wait_for_hello(ends, _HELLO_S)
        except BaseException:
            for link in links:
                link.close(0.1)
            close()
            raise
        return AgentNodes(
            links, self._nodes(numbers), port_count(job), folder=DISK, is_shared=self._set.shared, on_close=close
        )

    def release(self, run_dir: Path) -> None:
        supervisors.drop(run_dir)

    def _nodes(self, numbers: Sequence[int]) -> tuple[Node, ...]:
        return tuple(
            Node(node_rank=rank, name=f"sim{number}", address="127.0.0.1", cores=self._set.cores)
            for rank, number in enumerate(numbers)
        )

    def _close(self, started: Sequence[subprocess.Popen[bytes]], links: Sequence[Link], disk: str | None) -> None:
        self._gone |= {int(link.name[3:]) for link in links if link.lost is not None}
        for process in started:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if disk is not None:
            shutil.rmtree(disk, ignore_errors=True)


def _simulate(told: dict[str, object]) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """Start a process that simulates nodes. Return it, and a socket to each node."""
    numbers = told["numbers"]
    assert isinstance(numbers, list)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.testing.sim.host", json.dumps(told)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            # Drop variables that name a run. Otherwise Paceline would kill this process as a leftover of that run.
            env=processes.of_no_run(os.environ),
            start_new_session=True,
        )
        kept = []
        for at in range(0, len(numbers), BATCH):
            ends = [socket.socketpair() for _ in numbers[at : at + BATCH]]
            socket.send_fds(ours, [b"nodes"], [far.fileno() for _, far in ends])
            for near, far in ends:
                far.close()
                kept.append(near)
    return process, kept
