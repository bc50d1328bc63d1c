"""The nodes of the target `local`, which are child processes of the supervisor."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from paceline.job.plan import Command, Node, ProcessExit, RemotePaths, StartedCommand
from paceline.observe.node.load import LoadMeter
from paceline.observe.node.messages import WatchedWorkers
from paceline.remote.agent.commands import Commands
from paceline.remote.agent.machine import REPORT_BYTES, disk_of, disks_here, oom_kills
from paceline.runs.folder import RunFolder
from paceline.system import processes
from paceline.system.files import make_own


class LocalNodes:
    """A run's nodes on this machine: child processes of the supervisor.

    Args:
        give_back: Called by `close` to give back the run's lease.
        new_ports: Leases other ports, and returns them. With None, the ports stay.
    """

    def __init__(
        self,
        nodes: tuple[Node, ...],
        ports: tuple[int, ...],
        give_back: Callable[[], None],
        new_ports: Callable[[], tuple[int, ...]] | None = None,
    ) -> None:
        self.nodes, self.ports = nodes, ports
        self._give_back, self._new_ports = give_back, new_ports
        #: `note_hang` tells waiting runs since when this run hangs. `leave_reason` returns why this run must return its nodes.
        self.note_hang: Callable[[str | None], None] = lambda since: None
        self.leave_reason: Callable[[], str] = lambda: ""
        #: The commands that this object has started, each with the rank of its node.
        self._commands = Commands()
        self._folder: RunFolder | None = None
        self._meter: LoadMeter | None = None

    def send(self, folder: RunFolder, library_dir: Path) -> RemotePaths:
        self._folder = folder
        make_own(folder.scratch)
        return RemotePaths(
            run_dir=folder.path,
            work_dir=folder.work,
            scratch_dir=folder.scratch,
            library_dir=library_dir,
            python=sys.executable,
        )

    def shell(self, node_rank: int) -> None:
        return None

    def begin(self, attempt: int) -> None:
        """Do nothing for a new attempt, because nodes use the run's folder."""

    def renew_ports(self) -> None:
        if self._new_ports is not None:
            self.ports = self._new_ports()

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> StartedCommand:
        environment = {**command.defaults, **shell, **command.environment}
        pid, cold = self._commands.start_worker(
            command.argv,
            spare=command.spare,
            is_spare=command.is_spare,
            env=environment,
            cwd=str(work_dir),
            log=str(command.log),
            tag=str(command.node_rank),
        )
        return StartedCommand(command=command, pid=pid, cold=cold)

    def signal(self, pid: int, node_rank: int, number: int) -> bool:
        return processes.send(pid, number)

    def is_alive(self, pid: int, node_rank: int) -> bool:
        return processes.is_alive(pid)

    def ended(self) -> list[ProcessExit]:
        # The supervisor also reaps orphans, because it is their parent (PR_SET_CHILD_SUBREAPER). Report only commands that ended.
        ends, _ = self._commands.reap()
        return [
            ProcessExit(
                pid=end["pid"],
                node_rank=int(end["tag"]),
                exit_code=end["code"],
                time=end["time"],
                peak_bytes=end["peak"],
            )
            for end in ends
        ]

    def lost(self) -> dict[int, str]:
        return {}

    def fetch(self) -> None:
        """Do nothing, because all files of the run are on this machine."""

    def kill_all(self) -> None:
        """Kill all child processes except warm spares, loaded in advance for new workers."""
        deadline = time.monotonic() + 10
        # Repeat until no process is left: a process may fork just before the signal kills it.
        while (left := self._workers()) and time.monotonic() < deadline:
            for pid in left:
                processes.send(pid, 9)
            time.sleep(0.005)

    def kill_session(self, pid: int, node_rank: int) -> None:
        processes.kill_session(pid)

    def are_ending(self, pids: Mapping[int, Sequence[int]]) -> bool:
        """Return whether any process of {node rank: pids} is about to end."""
        return any(map(processes.is_ending, chain.from_iterable(pids.values())))

    def _workers(self) -> set[int]:
        return set(processes.descendants(os.getpid())) - self._commands.spares

    def oom_kills(self) -> dict[int, int]:
        return dict.fromkeys(range(len(self.nodes)), oom_kills())

    def is_disk_full(self) -> bool:
        assert self._folder is not None, "send comes first"
        return disk_of(str(self._folder.path))[0] < REPORT_BYTES

    def loads(self, workers: Mapping[int, WatchedWorkers]) -> dict[int, dict[str, object]]:
        """Return {0 (node rank): CPU, memory and GPU use of this machine and its workers}."""
        if self._meter is None:
            gpus = tuple(dict.fromkeys(gpu for node in self.nodes for gpu in node.gpus))
            self._meter = LoadMeter(gpus or None)
        here: WatchedWorkers | None = None
        if 0 in workers:
            ranks = {rank: pid for one in workers.values() for rank, pid in one["ranks"].items()}
            here = {**workers[0], "ranks": ranks}
        return {0: self._meter.look(here)}

    def disks(self, paths: Sequence[str]) -> Mapping[str, tuple[int, int, int]]:
        return disks_here(paths)

    def close(self) -> None:
        self._commands.spares.clear()
        self.kill_all()
        processes.reap()
        if self._folder is not None:
            shutil.rmtree(self._folder.scratch, ignore_errors=True)
        self._give_back()
