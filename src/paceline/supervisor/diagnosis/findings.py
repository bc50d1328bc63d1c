"""Collect the facts on an attempt at its end, and derive the failure report from them."""

from __future__ import annotations

import dataclasses
import functools
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.job.plan import Launch, RankSlot
from paceline.observe.load_watch import Sample
from paceline.observe.wait_graph import ranks_text
from paceline.runs import work_dir
from paceline.runs.failure import FailureReport, logs_command, signal_name
from paceline.runs.folder import RunFolder
from paceline.runs.log_start import last_lines_start
from paceline.runs.logs import last_lines, lines_of
from paceline.supervisor.diagnosis.diagnose import ErrorFile, WorkerEnd, first_failure, script_exit_code, worker_report
from paceline.supervisor.diagnosis.evidence import crash_stack, find_clash, holder_here, printed_traceback, stalled_text
from paceline.supervisor.diagnosis.hints import missing_text, with_hints
from paceline.supervisor.diagnosis.memory import memory_text
from paceline.supervisor.in_containers import why_not_started
from paceline.system import linked
from paceline.system.files import read_json
from paceline.system.run_variables import EXIT_RESIZE

#: Number of last lines of a log in which to search for a port, if the exception does not name the port.
_PORT_LINES = 200
#: Number of last lines in which to search for a crash: faulthandler may have added the stacks of dozens of threads.
_CRASH_LINES = 400
#: Signals by which mpirun ends its other workers after it has lost a worker or a node.
_BY_LAUNCHER = frozenset({signal.SIGTERM, signal.SIGKILL})
#: If a killed worker had fewer bytes, memory is not the cause: the kernel's count of kills includes other users' kills.
_SMALL = 64 << 20
#: The beginning of torch's error for a GPU out of memory.
_OF_GPU = re.compile(r"\b(CUDA|HIP) out of memory")
#: mpirun's message on a lost node.
_LOST_DAEMON = re.compile(r"\b(PRTE|PRRTE|ORTE) has lost communication with a remote daemon")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The facts about an attempt's end, to find the cause of a failure.

    is_here: Whether all nodes are this machine.
    started: Ranks whose processes have started.
    launcher_code: mpirun's exit code; None without mpirun, or while it runs.
    exit_codes, ended_at, errors: Rank -> exit code, Unix time of the end, and content of the error file.
    asked: Rank -> Unix time at which the supervisor sent SIGTERM to the worker.
    lost: Node rank -> a text that says how the supervisor found that the node is lost.
    is_oom: Node rank -> whether the node's kernel has killed a process for memory within the last seconds.
    driver_from: Byte offset in the supervisor's log (`driver.log`) at which the attempt begins.
    samples: Samples of the nodes' and workers' use of CPU, memory and GPUs, the newest last.
    peaks: Rank -> peak memory in bytes.
    """

    launch: Launch
    folder: RunFolder
    is_here: bool
    has_launcher: bool
    launcher_code: int | None
    started: frozenset[int]
    exit_codes: Mapping[int, int]
    ended_at: Mapping[int, float]
    errors: Mapping[int, ErrorFile]
    asked: Mapping[int, float]
    lost: Mapping[int, str]
    driver_from: int
    is_oom: Callable[[int], bool]
    is_disk_full: Callable[[], bool]
    samples: Sequence[Sample] = ()
    peaks: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def ends(self) -> list[WorkerEnd]:
        """Return the known facts about the end of each worker."""
        return [self._end_of(place) for place in self.launch.places]

    def may_be_oom(self, rank: int) -> bool:
        """Return whether the kernel may have killed this worker because memory ran out."""
        # Ignore the measured peak of a container, because it is the memory of the container engine's client.
        is_small = self.launch.prepared[0].container is None and 0 < self.peaks.get(rank, 0) < _SMALL
        return not is_small and self.is_oom(self.launch.places[rank].node_rank)

    def driver_lines(self) -> tuple[str, ...]:
        """Return the supervisor's last log lines (`driver.log`) from this attempt."""
        try:
            with open(self.folder.driver_log, "rb") as file:
                file.seek(self.driver_from)
                return tuple(file.read().decode(errors="replace").splitlines()[-20:])
        except OSError:
            return ()

    @functools.cached_property
    def _further(self) -> list[int]:
        count = len(self.launch.places)
        return [rank for rank in self.folder.ranks_with_log(self.launch.attempt) if rank >= count]

    def _end_of(self, place: RankSlot) -> WorkerEnd:
        rank, error = place.rank, self.errors.get(place.rank)
        exit_code = self.exit_codes.get(rank)
        stopped = rank in self.asked
        if stopped and error is not None:
            # If the script raised an error before SIGTERM was sent, it failed by itself, and was not stopped.
            own = error.get("time", 0.0) < self.asked[rank]
            stopped, error = (False, error) if own else (True, None)
        exit_code = script_exit_code(exit_code, error)
        # The log of a worker that was stopped, or ended well, explains nothing; a run may have thousands of them.
        explains = exit_code not in (0, None) and not stopped
        lines = last_lines(self.folder.rank_log(self.launch.attempt, rank), _CRASH_LINES) if explains else []
        return WorkerEnd(
            rank=rank,
            node=self.launch.nodes[place.node_rank].name,
            exit_code=exit_code,
            error=error,
            ended_at=self.ended_at.get(rank),
            stopped=stopped,
            stack=crash_stack(lines),
            # Search the log of a program that has no error file: only Paceline's code in a Python script writes this file.
            printed=printed_traceback(self._with_below(rank, lines)) if exit_code and not stopped else None,
            last_lines=tuple(lines[-20:]),
        )

    def _with_below(self, rank: int, lines: list[str]) -> list[str]:
        attempt, count = self.launch.attempt, len(self.launch.places)
        ranks = [rank, *(one for one in self._further if one % count == rank)]
        if len(ranks) == 1:
            return lines
        start = last_lines_start(self.folder, [attempt], ranks, _CRASH_LINES)
        return [line.text for line in lines_of(self.folder, [attempt], ranks, start)]


def report(found: Findings) -> FailureReport | None:
    """Return the failure report of an attempt, or None if every worker succeeded."""
    launch, ends = found.launch, found.ends()
    stalled = stalled_text(found.folder.stalled(launch.attempt))
    if (lost := _lost_report(found, ends)) is not None:
        return with_hints(lost, launch.job, stalled)
    if (never := _not_started(found, ends)) is not None:
        return never
    failed = worker_report(
        launch.run_id,
        launch.attempt,
        ends,
        oom_killed=(first := first_failure(ends)) is not None and found.may_be_oom(first.rank),
        disk_full=found.is_disk_full(),
        clash=find_clash(
            launch,
            ends,
            log_lines=lambda rank: last_lines(found.folder.rank_log(launch.attempt, rank), _PORT_LINES),
            holder=holder_here if found.is_here else lambda port: None,
        ),
    )
    if failed is not None:
        is_shared = launch.run_dir == found.folder.path
        at = work_dir.place(read_json(found.folder.job), is_shared=is_shared)
        not_copied = linked.read(found.folder.linked)
        absent = missing_text(failed.exception or "", launch.job, at, not_copied, is_shared=is_shared)
        return _with_own_paths(with_hints(_with_memory(failed, found), launch.job, stalled, absent), found, at)
    missing = {end.rank for end in ends if end.exit_code is None or end.stopped}
    workers = [place.rank for place in launch.places if place.rank in missing and place.role == "worker"]
    return with_hints(_launcher_report(found, workers), launch.job, stalled) if workers else None


def _with_own_paths(failed: FailureReport, found: Findings, at: work_dir.Place) -> FailureReport:
    def shown(text: str) -> str:
        return at.with_own_paths(text, found.launch.run_dir)

    trace = shown(failed.traceback) if failed.traceback else failed.traceback
    lines = tuple(map(shown, failed.last_lines))
    return dataclasses.replace(failed, message=shown(failed.message), traceback=trace, last_lines=lines)


def _with_memory(failed: FailureReport, found: Findings) -> FailureReport:
    if failed.cause != "memory" or failed.rank is None:
        return failed
    plan = read_json(found.folder.memory_plan(found.launch.attempt, failed.rank))
    nodes = {place.rank: place.node_rank for place in found.launch.places}
    peak, by_kernel = found.peaks.get(failed.rank, 0), failed.signal is not None
    on_gpu = _OF_GPU.search(failed.exception or "") is not None
    text = memory_text(failed.rank, found.samples, nodes, plan, peak_bytes=peak, by_kernel=by_kernel, on_gpu=on_gpu)
    # End the message with a full stop, which an exception's line may lack.
    message = failed.message if failed.message.endswith((".", "!", "?")) else f"{failed.message}."
    return dataclasses.replace(failed, message=f"{message} {text}") if text else failed


def may_have_lost_a_node(found: Findings) -> bool:
    """Return whether a node's loss, not found yet, may explain all failures.

    True if some workers have not reported their ends, and all failed workers may have failed because of a lost peer.
    """
    if found.is_here or found.lost or len(found.launch.nodes) == 1:
        return False
    ends = found.ends()
    if _LOST_DAEMON.search("\n".join(found.driver_lines())):
        # Don't require that any report is missing: workers of a lost node may still report through the shared folder.
        return all(end.is_victim or end.signal in _BY_LAUNCHER for end in ends if end.failed)
    if all(end.exit_code is not None or end.error is not None for end in ends) or _noticed(found.driver_lines()):
        return False
    failed = [end for end in ends if end.failed]
    # Open MPI 5 exits with 0 when it has lost a host. So if no worker failed, its exit alone may mean a lost node.
    return (bool(failed) or found.launcher_code is not None) and all(
        end.is_victim or (found.has_launcher and end.signal in _BY_LAUNCHER) for end in failed
    )


def _lost_report(found: Findings, ends: list[WorkerEnd]) -> FailureReport | None:
    lost = lost_nodes(found)
    own = [end for end in ends if end.error is not None and not end.stopped and not end.is_victim]
    # Don't blame workers of an elastic run that ended on request, so that the run could continue with more nodes.
    if found.launch.job.node_range is not None:
        own = [end for end in own if end.exit_code != EXIT_RESIZE]
    if not lost or own:
        return None
    node_rank, how = min(lost.items())
    name = found.launch.nodes[node_rank].name
    ranks = [place.rank for place in found.launch.places if place.node_rank in lost]
    return FailureReport(
        cause="node_lost",
        message=f"Node {name} was lost, with rank{'s' if len(ranks) > 1 else ''} "
        f"{ranks_text(ranks)}: {how_lost(how, name)}.",
        attempt=found.launch.attempt,
        rank=ranks[0] if ranks else None,
        node=name,
        see=logs_command(found.launch.run_id),
    )


def lost_nodes(found: Findings) -> Mapping[int, str]:
    """Return {rank of a lost node: how the loss was found, as text}.

    Nodes that Paceline simulates on this machine can't be lost. But users may try elastic runs with simulated nodes. So
    a simulated node counts as lost if SIGKILL ended all its workers, and not for lack of memory.
    """
    launch = found.launch
    if found.lost or not found.is_here or launch.job.node_range is None or len(launch.nodes) == 1:
        return found.lost
    killed = {
        end.rank: end.ended_at or 0.0
        for end in found.ends()
        if end.exit_code == 128 + signal.SIGKILL and end.error is None and not end.stopped
    }
    ranks = {node.node_rank: [p.rank for p in launch.places if p.node_rank == node.node_rank] for node in launch.nodes}
    gone = [node for node, its in ranks.items() if all(rank in killed for rank in its)]
    if not gone or any(found.may_be_oom(rank) for node in gone for rank in ranks[node]):
        return found.lost
    if len(gone) == len(ranks):
        # A launcher that has lost one node may kill the workers of all other nodes. The node that ended first was lost.
        gone = [min(gone, key=lambda node: min(killed[rank] for rank in ranks[node]))]
    return dict.fromkeys(gone, "all its workers were killed by SIGKILL")


def _not_started(found: Findings, ends: list[WorkerEnd]) -> FailureReport | None:
    """Return the failure report if a container never started its script."""
    launch = found.launch
    seen: list[tuple[int | None, int | None, tuple[str, ...]]] = [
        (end.rank, end.exit_code, end.last_lines) for end in ends
    ]
    if found.has_launcher and found.launcher_code is not None:
        seen = [(None, found.launcher_code, found.driver_lines())]
    for rank, code, lines in seen:
        started = found.folder.worker_start(launch.attempt, rank or 0).exists()
        if code and not started and (told := why_not_started(launch, code, lines)):
            return FailureReport(
                cause="launcher",
                message=told,
                exit_code=code,
                attempt=launch.attempt,
                rank=rank,
                last_lines=lines,
                see=logs_command(launch.run_id, rank),
            )
    return None


def _launcher_report(found: Findings, missing: list[int]) -> FailureReport:
    launch, driver, code = found.launch, found.driver_lines(), found.launcher_code
    starter = launch.starter.name if launch.starter else "mpirun"
    noticed = _noticed(driver)
    rank: int | None = None
    cause = "launcher"
    if code is not None and 128 < code < 128 + signal.NSIG and not noticed:
        message = f"{starter} was killed by {signal_name(code - 128)}."
    elif noticed:
        rank, number = noticed
        message, cause = f"rank {rank} failed: its process was killed by {signal_name(number)}.", "killed"
        code = 128 + number
    elif not any(rank in found.started for rank in missing):
        message = f"{starter} started no worker; it ended with exit code {code}."
        if _NO_PMIX.search("\n".join(driver)):
            message = f"{message} {_INSTALL_PMIX}"
    else:
        message = f"{starter} ended with exit code {code} while ranks {missing} had not reported their end."
    places = {place.rank: place for place in launch.places}
    return FailureReport(
        cause=cause,
        message=message,
        exit_code=code or 1,
        attempt=launch.attempt,
        rank=rank,
        node=launch.nodes[places[rank].node_rank].name if rank is not None else None,
        last_lines=driver,
        see=logs_command(launch.run_id, rank),
    )


#: Slurm's message if its PMIx plugin is installed and the PMIx library is missing.
_NO_PMIX = re.compile(
    r"load PMIx library|Couldn't find the specified plugin name for mpi/pmix|cannot (?:find|create) .*mpi/pmix"
)
_INSTALL_PMIX = (
    "Slurm's plugin for PMIx can't load libpmix.so: install the package that has it on the nodes (Debian, Ubuntu: "
    "libpmix-dev), or set mpi='mpirun'."
)


def _noticed(driver: tuple[str, ...]) -> tuple[int, int] | None:
    """Return (rank, signal) of a killed worker from mpirun's output, or None."""
    found = re.search(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)", "\n".join(driver))
    return (int(found[1]), int(found[2])) if found else None


def how_lost(how: str, name: str) -> str:
    """Strip the node's name and the full stop from a sentence on its loss."""
    return how.removeprefix(f"{name}: ").rstrip(".")
