"""Keep a process on each node that has imported the workers' modules, to fork the workers of the run's next attempt.

Such a warm spare (`paceline.worker.spare`) continues after an attempt. It ends when the run gives its nodes back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from paceline.errors import EngineError
from paceline.job.plan import Command, Launch, NodeSetup, ProcessExit, RemotePaths
from paceline.launchers import environment
from paceline.runs.driver_log import say
from paceline.runs.failure import signal_name
from paceline.runs.folder import RunFolder
from paceline.supervisor.state_keepers import StateKeepers
from paceline.system.files import read_json
from paceline.system.spare_client import VARIABLE
from paceline.targets import Nodes

#: Seconds to wait after the workers' start before starting spares: Python processes that import the workers' modules.
_AFTER_S = 0.5


class WarmSpares:
    """A manager of the idle processes from which a run's attempts fork workers."""

    def __init__(self) -> None:
        self._nodes: Nodes | None = None
        self._pids: dict[int, int] = {}
        #: Node rank -> attempt that started the node's spare; `_told`: node rank -> the spare's last logged report.
        self._begun: dict[int, int] = {}
        self._told: dict[int, object] = {}
        self._wanted: dict[int, Command] = {}
        self._shells: Sequence[Mapping[str, str]] = ()
        self._at_s = 0.0
        self.keepers = StateKeepers()
        #: Path prefix of the files of all spares, with `%` for the node's rank. "" if nodes don't copy training states.
        self.path = ""

    def begin(self, launch: Launch, nodes: Nodes, shells: Sequence[Mapping[str, str]]) -> None:
        """Prepare for an attempt. Keep idle processes if the nodes are unchanged."""
        if nodes is not self._nodes:
            self._nodes, self._pids, self._begun, self._told = nodes, {}, {}, {}
            self.keepers.forget()
        self._shells, self._at_s, self.path = shells, 0.0, launch.spare if launch.states_key else ""
        here = "%" not in launch.spare
        places = launch.nodes[:1] if here else launch.nodes
        self._wanted = {node.node_rank: _command(launch, node.node_rank) for node in places if launch.spare}

    def look(self, folder: RunFolder, launch: Launch) -> None:
        """Start missing idle processes once the workers run, and log their reports."""
        if not self._wanted or self._nodes is None:
            return
        self._at_s = self._at_s or time.monotonic() + _AFTER_S
        if time.monotonic() < self._at_s:
            return
        self.keepers.look(folder, launch, self._nodes, self._shells)
        for node_rank, command in self._wanted.items():
            name = launch.nodes[node_rank].name
            if node_rank not in self._begun:
                self._begun[node_rank] = launch.attempt
                try:
                    shell = self._shells[node_rank]
                    started = environment.with_paths(command, launch, shell)
                    self._pids[node_rank] = self._nodes.start(started, launch.work_dir, shell).pid
                except (OSError, EngineError) as error:
                    say(f"node {name} has no warm process: {error}")
            report = read_json(folder.spare(self._begun[node_rank], node_rank))
            if report and report != self._told.get(node_rank):
                self._told[node_rank] = report
                say(f"node {name}: {_text(report)}")

    def ended(self, ended: ProcessExit, launch: Launch) -> None:
        """Log a crash if `ended` is one of the idle processes."""
        self.keepers.ended(ended, launch)
        if self._pids.get(ended.node_rank) == ended.pid and ended.exit_code:
            del self._pids[ended.node_rank]
            how = signal_name(ended.exit_code - 128) if ended.exit_code > 128 else f"exit code {ended.exit_code}"
            say(f"the warm process of node {launch.nodes[ended.node_rank].name} ended ({how})")


def spare_path(launch: Launch, seen: RemotePaths, *, is_here: bool) -> tuple[str, str]:
    """Return the socket path of the idle processes that fork workers, and a warning.

    The path is "" without idle processes. The warning says why a job that wants them can't have them, or is "".

    is_here: Whether all nodes are this machine. If not, the path has "%" in place of a node's rank.
    """
    job = launch.job
    if job.warm == "off" or not (job.max_restarts or job.node_range):
        return "", ""
    if (why := _unsafe(launch.prepared, seen, is_python=job.is_python, is_mpi=job.launcher == "mpi")) is not None:
        return "", f"later attempts start cold: {why}"
    return str(seen.scratch_dir / ("spare_0" if is_here else "spare_%")), ""


def _unsafe(prepared: Sequence[NodeSetup], seen: RemotePaths, *, is_python: bool, is_mpi: bool) -> str | None:
    if not is_python:
        return "the entry is no Python script or module"
    if any(one.container for one in prepared):
        return "the workers run in containers"
    if is_mpi and seen.starter is not None:
        return f"{seen.starter.name} starts the workers"
    return None


def _command(launch: Launch, node_rank: int) -> Command:
    command = Command(
        argv=environment.worker_argv(launch, node_rank, "--spare"),
        # Leave out variables of a rank, because in /proc each worker that the spare forks has the spare's environment.
        environment=environment.of_run(launch)
        | dict(launch.job.environment_variables)
        | {VARIABLE: launch.spare.replace("%", str(node_rank)), "PACELINE_STACKS_SIGNAL": "0"},
        defaults=environment.defaults(launch, launch.places[0]),
        node_rank=node_rank,
        log=RunFolder(launch.run_dir).driver_log,
        is_spare=True,
    )
    return command


def _text(report: Mapping[str, object]) -> str:
    skipped = report.get("skipped")
    without = ", ".join(f"{name} {why}" for name, why in skipped.items()) if isinstance(skipped, dict) else ""
    without = f"; without packages that are not safe to fork: {without}" if without else ""
    if failed := report.get("failed"):
        return f"no warm process, so the next attempt starts cold: {failed}{without}"
    memory = report.get("memory_bytes")
    mib = f"{memory / 2**20:.0f} MiB" if isinstance(memory, int) else "unknown memory"
    return f"a warm process is ready for the next attempt: {report.get('modules')} modules, {mib}{without}"
