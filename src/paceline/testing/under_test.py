"""What a conformance suite has to know of a compute target: written by the target's author."""

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
    """A compute target with all that the suite asks of it. Subclass it, set what differs, override what does not fit.

    folder: a folder of its own for workspace and sources, on a file system that the nodes share with this machine, or
        not: both are worth a test.
    shared_folder: one that all nodes see under the same path; None where there is no such thing.

    kind, settings: as `paceline compute add` takes them.
    backends: those of the launchers that fit, beside one plain process.
    node_count, process_count_per_node: what a run on several nodes asks for; the target must have that.
    values: fields of the job that every run gets, such as `environment`.
    never_fits: fields of a job that the target must refuse.
    has_queue: of two runs that want all nodes one has to wait. Runs of `whole` want all nodes.
    has_spare_node: there is one more node than `node_count`, so that a run may go on after a loss.
    has_outputs_early: outputs and uploaded files can be read while the run goes on; else at its end.
    node_lost_s: how long the loss of a node may take to be noticed.
    slack_s: added to all limits of time; for machines that do much else.
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
        """What jobs give as `compute_target`."""
        return configured.LOCAL if self.kind == configured.LOCAL else "under-test"

    @functools.cached_property
    def workspace_dir(self) -> Path:
        """The workspace of all runs, which knows the target."""
        path = self.folder / "ws"
        if self.name != configured.LOCAL:
            described = configured.Configured(name=self.name, kind=self.kind, settings=self.settings)
            configured.add(path, described, replace=True)
        return path

    @property
    def whole(self) -> Mapping[str, Any]:
        """What a job asks for that leaves no room for another of the kind."""
        return {
            "node_count": self.node_count,
            "process_count_per_node": self.process_count_per_node,
            "distributed_backend": self.backends[0],
        }

    def slow_preparation(self) -> Mapping[str, Any] | None:
        """What a job asks for that keeps it `Preparing` for a minute; None where that can't be had.

        Here: a package in `shared_folder` that takes its time to be built.
        """
        if self.shared_folder is None:
            return None
        package = write_slow_package(self.shared_folder / "slow-package")
        return {"environment": Environment(pip_packages=(str(package),), layered=True)}

    def processes(self, run: Run) -> dict[int, str]:
        """What of a run is alive on any node, the supervisor too: pid -> command line.

        Here: processes of this machine that name the run in their command line or their environment. To be
        overridden where nodes are other machines.
        """
        found, name = {}, os.fsencode(run.id)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
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
        """What else an ended run has left: leases, allocations, folders on nodes. Empty once it has given all back.

        Here: scratch folders of this machine. To be extended by what the target's runs hold.
        """
        places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        return [str(path) for place in places for path in place.glob(f"paceline-{run.id[-8:]}*")]

    def kill_supervisor(self, run: Run, *, with_guardian: bool) -> None:
        """Kill the run's supervisor by SIGKILL, and with it, or not, its parent that sets right what it leaves.

        Here: on this machine, by `processes`.
        """
        pids = [pid for pid, command in self.processes(run).items() if "paceline.supervisor" in command]
        for pid in pids:
            if with_guardian or len(pids) == 1 or _parent(pid) in pids:
                processes.send(pid, 9)

    def node_to_lose(self, names: Sequence[str]) -> str:
        """Which of a run's nodes is to be lost. Here: the last."""
        return names[-1]

    #: Set to methods where the target can be told to lose a node: `lose_node(name)` lets the node of that name
    #: crash or cuts it off; `bring_back(name)` undoes it.
    lose_node: Any = None
    bring_back: Any = None

    @functools.cached_property
    def finished(self) -> dict[str, Run]:
        """Runs that have ended and that several checks look at: the suite's own."""
        return {}


def _parent(pid: int) -> int:
    """The parent of a process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
