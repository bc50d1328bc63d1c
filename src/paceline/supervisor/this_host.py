"""This machine, for a run whose nodes are elsewhere: what its supervisor has to see to here, while it holds them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.job.plan import Command, ProcessExit, StartedCommand
from paceline.system import processes
from paceline.targets.local_nodes import LocalNodes


class ThisHost(LocalNodes):
    """One node. Of this process's children it ends and waits for its own alone: the links to the run's nodes are others."""

    def __init__(self) -> None:
        super().__init__((), (), lambda: None)
        self._pids: set[int] = set()

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> StartedCommand:
        started = super().start(command, work_dir, shell)
        self._pids.add(started.pid)
        return started

    def ended(self) -> list[ProcessExit]:
        return [ended for pid in list(self._pids) for ended in self._wait(pid, os.WNOHANG)]

    def kill_all(self) -> None:
        for pid in list(self._pids):
            for child in [*processes.descendants(pid), pid]:
                processes.send(child, signal.SIGKILL)
            self._wait(pid, 0)

    def _wait(self, pid: int, options: int) -> list[ProcessExit]:
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, options)
            if not found:
                return []
            self._pids.discard(pid)
            return [ProcessExit(pid=pid, node_rank=0, exit_code=processes.shell_exit_code(status), time=time.time())]
        self._pids.discard(pid)
        return []
