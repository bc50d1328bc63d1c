"""The description of a compute target for the conformance suite. The target's author writes it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.environments.environment import Environment
from paceline.runs.run import Run
from paceline.system import processes
from paceline.targets import configured
from paceline.testing.slow_package import write_slow_package


class TargetUnderTest:
    """A description of a compute target. Subclass it, and override values that differ.

    folder: A folder for workspace and sources. Test a folder that the nodes share with this machine, and a folder that
        only this machine has.
    shared_folder: A folder with the same path on all nodes, or None.
    kind, settings: The arguments of `paceline compute add`.
    backends: Launchers that the target supports in addition to one plain process.
    node_count, process_count_per_node: Size of runs on several nodes, which the target must be able to run.
    values: Job fields of every run, such as `environment`.
    never_fits: Job fields that the target must refuse.
    has_queue: Whether a run waits while another run has all nodes. A run with the job fields `whole` needs all nodes.
    has_spare_node: Whether there is one node more than `node_count`, so that a run can continue after a loss.
    has_outputs_early: Whether outputs and uploaded files are readable during the run, not only at its end.
    node_lost_s: Longest time to detect the loss of a node.
    slack_s: Seconds that are added to all time limits, for busy machines.
    """

    kind: str
    settings: Mapping[str, Any] = {}
    backends: Sequence[str] = ("gloo", "mpi")
    node_count: int = 2
    process_count_per_node: int = 2
    values: Mapping[str, Any] = {}
    never_fits: Mapping[str, Any] = {"node_count": 10_000, "distributed_backend": "gloo"}
    has_queue: bool = True
    has_spare_node: bool = False
    has_outputs_early: bool = True
    node_lost_s: float = 30.0
    slack_s: float = 0.0

    def __init__(self, folder: Path, *, is_shared: bool = True) -> None:
        self.folder = folder
        self.shared_folder = folder if is_shared else None

    @property
    def name(self) -> str:
        """The name under which the target is registered, the `compute_target` of jobs."""
        return configured.LOCAL if self.kind == configured.LOCAL else "under-test"

    @functools.cached_property
    def workspace_dir(self) -> Path:
        """The workspace of all runs, in which the target is registered."""
        path = self.folder / "ws"
        if self.name != configured.LOCAL:
            described = configured.Configured(name=self.name, kind=self.kind, settings=self.settings)
            configured.add(path, described, replace=True)
        return path

    @property
    def whole(self) -> Mapping[str, Any]:
        """Job fields of a run that needs all nodes."""
        return {
            "node_count": self.node_count,
            "process_count_per_node": self.process_count_per_node,
            "distributed_backend": self.backends[0],
        }

    def slow_preparation(self) -> Mapping[str, Any] | None:
        """Return job fields that keep a job `Preparing` for a minute, or None.

        By default the environment has a package with a slow build, in `shared_folder`, if there is this folder.
        """
        if self.shared_folder is None:
            return None
        package = write_slow_package(self.shared_folder / "slow-package")
        return {"environment": Environment(pip_packages=(str(package),), layered=True)}

    def processes(self, run: Run) -> dict[int, str]:
        """Return {pid: command line} of a run's processes on all nodes.

        The supervisor is included. By default these are processes of this machine with the run's id in their command
        line or environment. Override the method for other machines.
        """
        found, name = {}, os.fsencode(run.id)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                is_its = name in command or name in (entry / "environ").read_bytes()
            except OSError:
                continue
            if is_its and processes.is_alive(int(entry.name)):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:300]
        return found

    def left(self, run: Run) -> list[str]:
        """Describe resources that an ended run has left, such as leases or folders.

        By default these are scratch folders of this machine. An override adds the resources of the target.
        """
        places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        return [str(path) for place in places for path in place.glob(f"paceline-{run.id[-8:]}*")]

    def kill_supervisor(self, run: Run, *, with_guardian: bool) -> None:
        """Kill the run's supervisor by SIGKILL, and its guardian too if `with_guardian`."""
        pids = [pid for pid, command in self.processes(run).items() if "paceline.supervisor" in command]
        for pid in pids:
            if with_guardian or len(pids) == 1 or _parent(pid) in pids:
                processes.send(pid, 9)

    def node_to_lose(self, names: Sequence[str]) -> str:
        """Return which of the nodes `names` a check shall lose; by default the last."""
        return names[-1]

    #: Optional methods: `lose_node(name)` crashes or disconnects a node, and `bring_back(name)` restores it.
    lose_node: Any = None
    bring_back: Any = None

    @functools.cached_property
    def finished(self) -> dict[str, Run]:
        """The ended runs that several checks of the suite share."""
        return {}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
