"""Targets with a fault each, for tests that the conformance suite finds it. Installed beside the page's `nice`."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import Any

from nice_target import NiceTarget

from paceline.remote.link import AgentNodes


class Generous(NiceTarget):
    """Takes every job."""

    kind = "generous"

    def check(self, job: Any) -> None:
        pass


class _Faulty(NiceTarget):
    nodes_class: type = AgentNodes

    def wait_for_nodes(self, job: Any, run_dir: Any, waiting: Any) -> Any:
        nodes = super().wait_for_nodes(job, run_dir, waiting)
        if nodes is not None:
            nodes.__class__ = self.nodes_class
        return nodes


class DeafNodes(AgentNodes):
    def signal(self, pid: int, node_rank: int, number: int) -> bool:
        return True

    def signal_all(self, pids: Any, numbers: Any) -> None:
        pass


class Deaf(_Faulty):
    """Passes no signal on: workers get no grace period."""

    kind = "deaf"
    nodes_class = DeafNodes


class ForeignNodes(AgentNodes):
    def start(self, command: Any, work_dir: Any, shell: Any) -> Any:
        return super().start(command, work_dir, {**shell, "SLURM_PROCID": "0"})

    def start_all(self, commands: Any, work_dir: Any, shells: Any) -> Any:
        return [self.start(command, work_dir, shells[command.node_rank]) for command in commands]


class Foreign(_Faulty):
    """Lets variables of its engine through, by which workers take themselves for another's."""

    kind = "foreign"
    nodes_class = ForeignNodes


class ForgetfulNodes(AgentNodes):
    def send(self, folder: Any, library_dir: Any) -> Any:
        subprocess.Popen(["sh", "-c", "sleep 60; exit", folder.run_id], start_new_session=True, env={})
        return super().send(folder, library_dir)


class Forgetful(_Faulty):
    """Leaves something running."""

    kind = "forgetful"
    nodes_class = ForgetfulNodes

    def start_supervisor(self, run_dir: Any, lock_fd: int, library_dir: Any, python: str) -> int:
        # The supervisor ends its descendants, but can't find a process with another session and no variables.
        subprocess.Popen(["sh", "-c", "sleep 60; exit", run_dir.name], start_new_session=True, env={})
        return super().start_supervisor(run_dir, lock_fd, library_dir, python)


class Namesake(NiceTarget):
    """Gives its nodes one and the same name."""

    kind = "namesake"

    def _nodes(self, job: Any) -> Any:
        return tuple(dataclasses.replace(node, name="nice0") for node in super()._nodes(job))
