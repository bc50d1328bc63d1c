"""Start a launcher's commands, watch the workers until they end, and end workers that must not continue.

A tick runs ten times per second, and after each child's exit. It checks:

    the commands' ends           a plain worker's end; mpirun's end
    end_<rank>.json              a worker's end under mpirun, from its parent process
    error_<rank>.json            an exception that left the script; the process may still linger
    rank_<rank>.log              its growth, for the merged view
    the nodes                    a lost node ends the attempt
    stop()                       cancel, time limit
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EngineError
from paceline.job.plan import Command, Launch, ProcessExit, StartedCommand
from paceline.observe.hang_watch import HangWatch, LostWait, hang_text
from paceline.observe.load_watch import LoadWatch
from paceline.observe.node.messages import WorkerFacts, WorkersReport
from paceline.observe.stack_dumps import Looks
from paceline.remote.wire import SILENCE_S
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport, logs_command
from paceline.runs.folder import RunFolder
from paceline.runs.record import Hang
from paceline.supervisor.diagnosis.evidence import stalled_text
from paceline.supervisor.execute import ExecCommands
from paceline.supervisor.in_containers import beside_worker, left_its_container
from paceline.supervisor.logs import LogWatch, NewFiles
from paceline.supervisor.node_watches import DiskWatch, OomWatch, ResizeWatch
from paceline.supervisor.nodes import all_started, send_signals
from paceline.supervisor.replacing import Replacing
from paceline.supervisor.spares import WarmSpares
from paceline.supervisor.supervision import Outcome, Wake
from paceline.system.files import read_json
from paceline.system.run_variables import EXIT_RESIZE
from paceline.targets import Nodes

if TYPE_CHECKING:
    from paceline.observe.stacks import RunStacks
    from paceline.supervisor.diagnosis.diagnose import ErrorFile
    from paceline.supervisor.diagnosis.findings import Findings

_TICK_S = 0.1
#: The pause after a check of the workers lasts at least this many times as long as the check itself.
_PAUSE = 9
#: Maximum number of seconds between two checks of the workers, and so until the supervisor reacts to a cancel.
_LONGEST_S = 0.8
#: Names of the workers' reports in the attempt's folder.
_REPORT = re.compile(r"(start|error|end)_(\d+)\.json", re.ASCII)
#: Seconds to wait after the first reported failure: another worker may have failed earlier and report it later.
_SETTLE_S = 0.25
#: Shorter wait in seconds if SIGKILL ended a worker on this machine, on which reports of exceptions arrive at once.
_KILLED_SETTLE_S = 0.05
#: Seconds to wait for the exit of a worker whose exception is known. Some never exit (MPI_Finalize waits for peers).
_LINGER_S = 3.0
#: Seconds to wait for the exit of a launcher such as mpirun after its last worker, and then for a late report.
_LAUNCHER_S = 5.0
#: Seconds to wait until the nodes have reported the exits of killed processes.
_KILL_S = 10.0
#: If a lost node may explain a failure, wait this many seconds longer than the time after which a silent node counts as lost.
_NOTICE_S = 3.0
#: Grace period in seconds of the other workers after an elastic run has lost a node: most of them only wait for that node.
_LOST_GRACE_S = 10.0
#: Maximum number of seconds to wait for the workers' stack dump before a run ends at its time limit.
_LAST_LOOK_S = 5.0
#: For how many seconds, and how often per second, the stacks of a straggler are sampled.
_WHERE_S, _WHERE_RATE = 4.0, 10.0
#: Seconds after an attempt's start at which the supervisor loads the modules for the diagnosis of failures and hangs.
_LOAD_S = 5.0


class WorkerWatch:
    """The workers of one attempt, watched in the supervisor's only thread.

    shells: The environment variables of each node, which each command extends.
    stop: Polled for a reason to end the workers; None if they may continue.
    on_running: Called once all workers have started.
    keeps_limits: Whether the supervisor limits the size of the workers' logs; False if the nodes do.
    resize: Watches for more nodes of an elastic run; None if the run is not elastic.
    replacing: Replaces lost workers; None if all workers start again.
    """

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        nodes: Nodes,
        wake: Wake,
        *,
        shells: Sequence[Mapping[str, str]],
        stop: Callable[[], str | None],
        on_running: Callable[[], None],
        keeps_limits: bool = True,
        warn: Callable[[str], None] = lambda text: None,
        note_hang: Callable[[Hang | None], None] = lambda hang: None,
        look_at_metrics: Callable[[], None] = lambda: None,
        resize: ResizeWatch | None = None,
        spares: WarmSpares | None = None,
        replacing: Replacing | None = None,
    ) -> None:
        self._launch, self._folder, self._nodes, self._wake = launch, folder, nodes, wake
        self._shells, self._stop, self._on_running, self._warn = shells, stop, on_running, warn
        self._look_at_metrics = look_at_metrics
        self._places = {place.rank: place for place in launch.places}
        #: (pid, node rank) of a started process -> its command
        self._started: dict[tuple[int, int], StartedCommand] = {}
        self._has_launcher = False
        self._news = NewFiles(folder.attempt(launch.attempt))
        #: (kind of report, rank) of workers' reports that could not be read yet.
        self._unread: set[tuple[str, int]] = set()
        #: CPU time in seconds that this thread had used when the current check of the workers began.
        self._used_s = time.thread_time()
        self._starting = set(self._places)
        self._workers = [place.rank for place in launch.places if place.role == "worker"]
        self._pids: dict[int, int] = {}
        self._exit_codes: dict[int, int] = {}
        #: rank -> time of its end by its node's clock, and time by `time.monotonic` at which the supervisor learned of it.
        self._ended_at: dict[int, float] = {}
        self._end_seen: dict[int, float] = {}
        #: rank -> peak memory of its process in bytes
        self._peaks: dict[int, int] = {}
        self._errors: dict[int, ErrorFile] = {}
        self._error_seen: dict[int, float] = {}
        self._asked: dict[int, float] = {}
        self._launcher_code: int | None = None
        self._lost: dict[int, str] = {}
        self._launcher_ended = 0.0
        self._running = False
        written = {reference.name for reference in launch.job.inputs if reference.is_output}
        outputs = [path for name, path in launch.prepared[0].inputs.items() if name in written]
        grown = getattr(nodes, "grown", None)
        self._logs = LogWatch(launch, folder, keeps_limits=keeps_limits, **({"grown": grown} if grown else {}))
        self._looks = Looks(launch, folder, nodes, shells, self._about, partial(beside_worker, launch, shells))
        self._hangs = HangWatch(launch, folder, self._looks, note_hang)
        self._exec = ExecCommands(launch, folder, nodes, shells, self._is_there, self._looks)
        self._resize, self._spares, self._replacing = resize, spares or WarmSpares(), replacing
        self._disks = DiskWatch(nodes, [str(launch.run_dir), *outputs], warn)
        self._loads = LoadWatch(nodes, folder, launch, lambda: self._pids, self._look_where)
        self._oom = OomWatch(nodes)
        self._driver_from = folder.driver_log.stat().st_size if folder.driver_log.exists() else 0
        self._ending_since: float | None = None
        self._load_at_s = time.monotonic() + _LOAD_S
        #: The workers' stacks, which the report shows if the run has exceeded its time limit.
        self._stood: str | None = None

    def run(self, commands: list[Command]) -> Outcome:
        """Start the commands, watch them until all have ended, and return the outcome."""
        stopped: str | None = None
        failure: FailureReport | None = None
        with closing(self._logs), closing(self._loads):
            try:
                failure = self._start(commands)
                if failure is None:
                    stopped = self._watch()
            finally:
                # End all processes before the report: the last output of workers is complete only after their exit.
                self._end_all()
                self._exec.close()
                self._looks.close()
            may_have_failed = failure is None and stopped is None and not self._ended_well()
            if may_have_failed and self._hangs.failure is None:
                self._wait_for_losses()
        if (slow := self._loads.end_text()) is not None:
            self._warn(slow)
        lost, resized = 0, False
        if may_have_failed:
            from paceline.supervisor.diagnosis.findings import lost_nodes, report

            findings = self._findings()
            failure, lost = self._hangs.failure or self._judged(report(findings)), len(lost_nodes(findings))
            resized = bool(failure and failure.exit_code == EXIT_RESIZE and self._resize and self._resize.requested)
            failure = None if resized else failure
        for path in self._folder.held(self._launch.attempt):
            path.unlink(missing_ok=True)
        codes = {str(rank): code for rank, code in sorted(self._exit_codes.items())}
        stalled = stalled_text(self._folder.stalled(self._launch.attempt)) if stopped else None
        if self._stood is not None:
            stalled = f"{stalled} {self._stood}" if stalled else f"At its end: {self._stood}"
        whole = self._replacing.why_not if self._replacing is not None else ""
        return Outcome(
            exit_codes=codes, failure=failure, stopped=stopped, stalled=stalled, lost=lost, whole=whole, resized=resized
        )

    # --- start the commands

    def _start(self, commands: list[Command]) -> FailureReport | None:
        failure = None
        shells = dict(enumerate(self._shells))
        for command, started in zip(
            commands, all_started(self._nodes, commands, self._launch.work_dir, shells), strict=False
        ):
            if isinstance(started, EngineError):
                raise started  # the nodes can't be reached, so the command has not failed
            if isinstance(started, OSError):
                failure = failure or FailureReport(
                    cause="launcher",
                    message=f"{command.argv[0]!r} could not be started: {started.strerror or started}.",
                    attempt=self._launch.attempt,
                    see=logs_command(self._launch.run_id),
                )
                continue
            self._started[started.pid, command.node_rank] = started
            self._has_launcher = self._has_launcher or command.is_launcher
            if started.cold and self._launch.attempt > 1:
                say(f"rank {command.ranks[0]} starts cold: {started.cold}")
            if not command.is_launcher:
                self._pids[command.ranks[0]] = started.pid
        return failure

    # --- watch the workers

    def _watch(self) -> str | None:
        """Watch the workers, then end them. Return why the run must stop, or None."""
        while True:
            began_s = time.monotonic()
            self._look()
            if self._is_over() and not self._has_replaced():
                self._end_gracefully()
                return None
            reason = self._stop()
            if reason is not None:
                if reason == "time_limit":
                    self._last_look()
                say(f"stopping the workers: {reason}")
                self._end_gracefully()
                return reason
            self._disks.look()
            self._oom.look()
            self._loads.look()
            self._exec.look()
            self._looks.look()
            if time.monotonic() > self._load_at_s:
                self._load_diagnosis()
            if self._running:
                self._hangs.look()
                self._look_at_metrics()
                self._spares.look(self._folder, self._launch)
                if self._resize is not None:
                    self._resize.look()
            if self._hangs.failure is not None:
                self._end_gracefully()
                return None
            self._pause(self._exec.pause_s(_TICK_S), began_s)

    def _look_where(self, ranks: tuple[int, ...]) -> None:
        from paceline.observe.profile import RunProfile

        def take(told: WorkersReport) -> None:
            if (found := RunProfile(told).place(ranks[0])) is not None:
                self._loads.note_place(ranks, *found)

        self._looks.begin_profile(take, seconds=_WHERE_S, rate=_WHERE_RATE, ranks=ranks[:1])

    def _last_look(self) -> None:
        if not self._running:
            return
        from paceline.observe.stacks import RunStacks

        found: list[RunStacks] = []
        self._looks.begin(lambda told: found.append(RunStacks(told)))
        deadline = time.monotonic() + _LAST_LOOK_S
        while not found and time.monotonic() < deadline and not self._is_over():
            self._wake.sleep(_TICK_S / 2)
            self._look()
            self._looks.look()
        if found:
            self._stood = hang_text(found[0])

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._lost or len(self._exit_codes) == len(self._places):
            return True
        failed_at = [self._end_seen[rank] for rank, code in self._exit_codes.items() if code != 0]
        if (failed_at and now - min(failed_at) > (_KILLED_SETTLE_S if self._was_killed_here() else _SETTLE_S)) or (
            self._errors and now - min(self._error_seen.values()) > _LINGER_S
        ):
            return True
        if all(self._exit_codes.get(rank) == 0 for rank in self._workers):
            return True  # only parameter servers are left, which run until they are ended
        if self._launcher_code is None:
            return False
        # Wait for a worker's report, which may arrive after its mpirun's exit. After a kill no report comes, so don't wait.
        return self._launcher_code > 128 or now - self._launcher_ended > _LAUNCHER_S / 5

    def _has_replaced(self) -> bool:
        """Start lost workers again if possible. Return whether the attempt continues."""
        if (replacing := self._replacing) is None or not any(self._exit_codes.values()):
            return False
        # Workers that were killed together may end one after the other. Replace all of them at once.
        self._look_until(lambda: not replacing.is_ending(self._unended()), _KILL_S)
        lost = {rank for rank, code in self._exit_codes.items() if code}
        from paceline.supervisor.diagnosis.findings import report
        from paceline.supervisor.diagnosis.retries import is_retried

        failure = self._judged(report(self._findings()))
        if failure is None or not is_retried(failure, self._launch.job):
            return False
        commands = {one.command.ranks[0]: one for one in self._started.values() if one.command.ranks[0] in lost}
        started = replacing.start(commands, set(self._living()), self._errors, failure.cause)
        for rank, new in started.items():
            self._started.pop((commands[rank].pid, commands[rank].command.node_rank), None)
            self._started[new.pid, new.command.node_rank] = new
            self._pids[rank] = new.pid
            for known in (self._exit_codes, self._ended_at, self._end_seen, self._peaks):
                known.pop(rank, None)
        return bool(started) and not replacing.why_not

    def _judged(self, failure: FailureReport | None) -> FailureReport | None:
        return failure if self._replacing is None else self._replacing.judged(failure)

    def _was_killed_here(self) -> bool:
        return self._nodes.shell(0) is None and 128 + signal.SIGKILL in self._exit_codes.values()

    def _look(self) -> None:
        """Handle exits, lost nodes, reports and log lines since the last call.

        Handle exits first. A remote node reports a process's exit only after it has sent all files of the process. So
        the files that are read after an exit include the report of the exception.
        """
        for ended in self._nodes.ended():
            self._ended(ended)
            self._spares.ended(ended, self._launch)
            self._exec.ended(ended)
            self._looks.ended(ended)
        for node_rank, how in self._nodes.lost().items():
            if node_rank not in self._lost:
                self._lost[node_rank] = how
                say(f"node {self._launch.nodes[node_rank].name} is lost: {how}")
        new = self._news.look()
        self._unread |= {(found[1], int(found[2])) for name in new if (found := _REPORT.fullmatch(name))}
        self._unread = {report for report in sorted(self._unread) if not self._take_report(*report)}
        if not self._running and not self._starting:
            self._running = True
            self._on_running()
        self._logs.look(new)

    def _look_until(self, is_so: Callable[[], bool], limit_s: float, pause_s: float = _TICK_S / 2) -> None:
        began_s = time.monotonic()
        deadline = began_s + limit_s
        while not is_so() and time.monotonic() < deadline:
            self._pause(pause_s, began_s)
            began_s = time.monotonic()
            self._look()

    def _pause(self, least_s: float, began_s: float) -> None:
        pause_s = min(_PAUSE * (time.monotonic() - began_s), _LONGEST_S)
        # The exit of a worker does not interrupt this first sleep, so keep it short: compute it from the CPU time of
        # the check, which does not grow on a busy machine, unlike the check's duration.
        time.sleep(min(_PAUSE * (time.thread_time() - self._used_s), pause_s, 2 * _TICK_S) / 2)
        self._wake.sleep(max(least_s, pause_s))
        self._used_s = time.thread_time()

    def _take_report(self, kind: str, rank: int) -> bool:
        """Read a worker's report "start", "error" or "end". Return False if missing or incomplete."""
        attempt = self._launch.attempt
        if rank not in self._places:
            return True
        if kind == "start":
            self._starting.discard(rank)
            if rank not in self._pids and (start := read_json(self._folder.worker_start(attempt, rank))):
                self._pids[rank] = start["pid"]
            return rank in self._pids
        if kind == "error":
            from paceline.supervisor.diagnosis.diagnose import error_of

            code = 0 if rank in self._asked else self._exit_codes.get(rank, 0)
            error = error_of(read_json(self._folder.worker_error(attempt, rank)), code)
            if rank not in self._errors and error is not None:
                self._errors[rank], self._error_seen[rank] = error, time.monotonic()
            return rank in self._errors
        # Use a worker's own report of its end only if a launcher started it: other workers' exit codes come from their parent.
        if rank not in self._exit_codes and self._has_launcher:
            if (end := read_json(self._folder.worker_end(attempt, rank))) is None:
                return False
            self._exit_codes[rank], self._ended_at[rank] = end["exit_code"], end["time"]
            self._end_seen[rank] = time.monotonic()
            self._peaks[rank] = end.get("peak_bytes", 0)
        return True

    def _ended(self, ended: ProcessExit) -> None:
        started = self._started.get((ended.pid, ended.node_rank))
        if started is None:
            return
        if started.command.is_launcher:
            self._launcher_code, self._launcher_ended = ended.exit_code, time.monotonic()
            name = Path(started.command.argv[0]).name
            say(f"{name} (pid {ended.pid}) ended with exit code {ended.exit_code}")
            return
        rank, code = started.command.ranks[0], ended.exit_code
        if code == 0 and left_its_container(self._launch, self._folder, rank, partial(self._is_alive, rank)):
            code = 128 + signal.SIGTERM
        self._exit_codes[rank], self._ended_at[rank], self._end_seen[rank] = code, ended.time, time.monotonic()
        if self._launch.prepared[0].container is None:  # a container's peak would be that of the engine's client
            self._peaks[rank] = ended.peak_bytes

    # --- end the workers

    def _end_gracefully(self) -> None:
        """Send SIGTERM to the workers, and wait for their end within the grace period.

        The workers' children get no SIGTERM, because a worker may need its data loaders to save a checkpoint. mpirun
        gets SIGTERM only if it has not started workers yet, because it kills its workers a second after SIGTERM.
        """
        self._ending_since = self._ending_since or time.monotonic()
        self._look()
        living = self._living()
        pids: dict[int, list[int]] = {}
        for rank in living:
            self._asked.setdefault(rank, time.time())
            pids.setdefault(self._places[rank].node_rank, []).append(self._pids[rank])
        # A stopped process (SIGSTOP, a debugger) handles SIGTERM only after SIGCONT.
        send_signals(self._nodes, pids, (signal.SIGTERM, signal.SIGCONT))
        if not living and self._has_launcher and self._launcher_code is None and not self._pids:
            for pid, node_rank in self._started:
                self._nodes.signal(pid, node_rank, signal.SIGTERM)
        grace_s = self._launch.job.grace_period_seconds
        if self._lost and self._launch.job.node_range:
            grace_s = min(grace_s, _LOST_GRACE_S)
        waits = LostWait(self._looks, [rank for rank, one in self._places.items() if one.node_rank in self._lost])

        def is_over() -> bool:
            if self._lost:
                waits.look()
            return waits.stuck.issuperset(self._living())

        self._look_until(is_over, grace_s)
        if left := self._living():
            why = f"did not end within {grace_s:g} s of SIGTERM" if set(left) - waits.stuck else "wait for lost ranks"
            say(f"ranks {left} {why}: killed")
        # mpirun exits after its workers and removes its files; wait for its exit, but at most `_LAUNCHER_S`.
        if self._has_launcher and not left:
            self._look_until(lambda: self._launcher_code is not None, _LAUNCHER_S)

    def _living(self) -> list[int]:
        return [rank for rank, pid in self._unended().items() if self._is_alive(rank, pid)]

    def _unended(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self._pids.items() if rank not in self._exit_codes}

    def _is_there(self, rank: int) -> bool:
        return rank in self._living() and self._folder.worker_start(self._launch.attempt, rank).exists()

    def _about(self, rank: int) -> WorkerFacts:
        return {"exit_code": self._exit_codes[rank]} if rank in self._exit_codes else {}

    def _is_alive(self, rank: int, pid: int) -> bool:
        return self._nodes.is_alive(pid, self._places[rank].node_rank)

    def _end_all(self) -> None:
        # Record the times before the kill: they distinguish killed workers from failed workers.
        for rank in self._living():
            self._asked.setdefault(rank, time.time())
        self._nodes.kill_all()
        deadline = time.monotonic() + _KILL_S
        while True:
            self._look()
            if not self._unreported() or time.monotonic() > deadline:
                return
            time.sleep(0.005)

    def _unreported(self) -> bool:
        return any(
            self._launcher_code is None
            if started.command.is_launcher
            else started.command.ranks[0] not in self._exit_codes
            for started in self._started.values()
            if started.command.node_rank not in self._lost
        )

    def _wait_for_losses(self) -> None:
        """Wait until a node's loss is found, if it may explain the failures.

        Workers detect a broken connection immediately, but a silent node counts as lost only after `silence_s`.
        """
        from paceline.supervisor.diagnosis.findings import may_have_lost_a_node

        silence_s: float = getattr(self._nodes, "silence_s", SILENCE_S)
        since = self._ending_since or time.monotonic()
        left_s = since + silence_s + _NOTICE_S - time.monotonic()
        self._look_until(lambda: not may_have_lost_a_node(self._findings()), left_s, _TICK_S)

    # --- diagnose failures

    def _load_diagnosis(self) -> None:
        """Import the modules for a diagnosis before an update of Paceline can replace them."""
        self._load_at_s = math.inf
        import_module("paceline.supervisor.diagnosis.findings")
        import_module("paceline.observe.wait_graph")
        import_module("paceline.observe.stacks")

    def _ended_well(self) -> bool:
        if self._lost or self._errors or self._asked or self._hangs.failure is not None:
            return False
        # An exit code of 0 is not enough: mpirun may exit with 0 after it has lost a remote node.
        has_mpirun = self._has_launcher and self._nodes.shell(0) is not None
        return not has_mpirun and all(self._exit_codes.get(rank) == 0 for rank in self._places)

    def _findings(self) -> Findings:
        from paceline.supervisor.diagnosis.findings import Findings

        return Findings(
            launch=self._launch,
            folder=self._folder,
            is_here=self._nodes.shell(0) is None,
            has_launcher=self._has_launcher,
            launcher_code=self._launcher_code,
            started=frozenset(self._pids),
            exit_codes=self._exit_codes,
            ended_at=self._ended_at,
            errors=self._errors,
            asked=self._asked,
            lost=self._lost,
            driver_from=self._driver_from,
            is_oom=self._oom.has_killed,
            is_disk_full=self._nodes.is_disk_full,
            samples=tuple(self._loads.samples),
            peaks=self._peaks,
        )
