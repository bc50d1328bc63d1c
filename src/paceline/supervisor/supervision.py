"""The state of a run in its supervisor, which alone writes the run's record."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.job.plan import Launch, NodeSetup, RemotePaths
from paceline.job.sizes import range_text
from paceline.runs import remote_status, states, store
from paceline.runs.claim import Claim
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.messenger import Messenger, MetricAlerts
from paceline.runs.record import Attempt, Hang, Owner, Replacement, RunRecord, parse_utc, utc_at, utc_now
from paceline.supervisor.spares import WarmSpares
from paceline.system.files import read_json
from paceline.targets import Nodes, Target
from paceline.targets.configured import LOCAL
from paceline.targets.shares import OVER_QUOTA

#: Seconds between two checks whether another run needs the nodes.
_ASK_S = 1.0


@dataclass
class Outcome:
    """The outcome of an attempt.

    stopped: Why a user, an engine such as Slurm, or a limit ended the attempt: "cancel", "time_limit" and so on; or None.
    stalled: A sentence on the collectives that the ranks waited for at the end, or None.
    lost: Number of lost nodes.
    whole: Why all workers start again although the job has `on_failure="replace"`, which replaces lost workers; or "".
    resized: Whether the workers ended at a checkpoint to continue with more nodes.
    """

    exit_codes: dict[str, int] = field(default_factory=dict)
    failure: FailureReport | None = None
    stopped: str | None = None
    stalled: str | None = None
    lost: int = 0
    whole: str = ""
    resized: bool = False


class Supervision:
    """The state of one run, from its wait in the queue to its end.

    most: Present maximum number of nodes of an elastic run; None for the job's maximum.
    reason: Why the next attempt starts, such as "restart after node_lost".
    nodes, seen, prepared: The nodes that the run holds now, the run's paths on the nodes, and the nodes' environments.
    held: Locks that protect the run's environment and its cached data from removal, until the run's end.
    left_out: Files that the run's outputs do not keep, each as {"name", "why"}.
    """

    def __init__(self, folder: RunFolder, claim: Claim) -> None:
        self.folder, self.claim = folder, claim
        # Create the pipe for signals first: from here on a signal is recorded instead of killing this process.
        self.wake = Wake()
        self.wake.check = claim.check
        self.record: RunRecord = store.stored(folder)
        assert self.record.job is not None, "only submitted runs have a supervisor"
        self.job: Job = self.record.job
        #: Values of the job's secrets.
        self.secrets: Mapping[str, str] = read_json(folder.secrets) or {} if self.job.secrets else {}
        self.messenger = Messenger(folder)
        self.alerts = MetricAlerts(folder, self.messenger, self.job.notify_on if self.job.notify else ())
        self.target: Target | None = None
        self.nodes: Nodes | None = None
        self.seen: RemotePaths | None = None
        self.prepared: tuple[NodeSetup, ...] = ()
        self.held = contextlib.ExitStack()
        self.left_out: list[dict[str, str]] = []
        self.most: int | None = None
        #: Minimum seconds from an attempt's start to a restart for more nodes; increased after a restart that brought none.
        self.elastic_s: float = self.job.elastic_seconds
        #: Whether all workers of the attempt have started.
        self.has_run = False
        self.reason = "start"
        #: Number of further replacements of workers that `max_restarts` allows in this attempt.
        self.replacements_left = 0
        #: Whether the run may return its nodes now and queue again; and why another run needs the nodes, or "".
        self.may_leave, self.leaves_for = False, ""
        self._asks_at = 0.0
        self.spares = WarmSpares()
        self._deadline: float | None = None

    @property
    def wanted(self) -> Job:
        """The job with the number of nodes to request from the target."""
        return self.job if self.most is None else self.job.at_most(self.most)

    @property
    def sized(self) -> Job:
        """The job with the number of nodes that the run holds."""
        return self.job if self.nodes is None or not self.job.node_range else self.job.resized(len(self.nodes.nodes))

    # --- changes of the run's record

    def to(self, status: str, **changes: Any) -> None:
        """Write `status` as the run's state, with further `changes` to its record."""
        self.claim.check()
        self.record = store.change(self.folder, self.record, status, **changes)

    def _write(self) -> None:
        self.claim.check()
        store.write(self.folder, self.record)

    def waiting(self, text: str) -> bool:
        """Record what the queued run waits for. Return whether the run must end instead."""
        if text != self.record.waiting_for:
            was_over_quota = OVER_QUOTA in (self.record.waiting_for or "")
            self.record = replace(self.record, waiting_for=text)
            self._write()
            if OVER_QUOTA in text and not was_over_quota:
                self.messenger.tell(self.record, "quota")
        return self.stop_reason() is not None

    def tell_once(self, event: str) -> None:
        """Send an event's messages at the first start and at a return from the queue, but not at other restarts."""
        if self.reason.startswith(("start", "preempted")):
            self.messenger.tell(self.record, event)

    def warn(self, text: str) -> None:
        """Record a warning, unless the record has it already."""
        if text not in self.record.warnings:
            say(f"warning: {text}")
            self.record = replace(self.record, warnings=(*self.record.warnings, text))
            self._write()

    def note_hang(self, hang: Hang | None) -> None:
        """Record a hang. None means that the hang has ended."""
        self.record = replace(self.record, hang=hang)
        self._write()
        # Tell users who wait for the shared hosts that the run hangs. Use a thread, because a host may not answer.
        if (note := getattr(self.nodes, "note_hang", None)) is not None:
            since = f"{str(hang['since_utc'])[:19].replace('T', ' ')} UTC" if hang else None
            threading.Thread(target=note, args=(since,), daemon=True).start()
        if hang is not None and self.job.on_hang == "report":
            self.messenger.tell(self.record, "hang")

    def note_growth(self, text: str) -> None:
        """Record that an elastic run will continue with more nodes."""
        self.record = replace(self.record, size=f"{self.record.size}, {text}")
        self._write()

    def owner(self) -> Owner:
        """Return the supervisor's pid and job, by which others see whether the run lives."""
        owner, known = store.owner(), self.record.owner
        if "engine" in known:
            owner["engine"] = known["engine"]
        if "job_id" in known:
            owner["job_id"] = known["job_id"]
        return owner

    def open_attempt(self, launch: Launch) -> None:
        """Record the start of an attempt, which does not hang yet."""
        if self.record.hang:
            self.note_hang(None)
        now = utc_now()
        cores = sum(node.cores for node in launch.nodes)
        attempt = Attempt(
            number=launch.attempt,
            started_utc=now,
            nodes=tuple(node.name for node in launch.nodes),
            # On this machine the queue counts one core per worker, although the run may use all cores.
            cores=min(cores, launch.job.world_size) if self.record.target == LOCAL else cores,
            gpus=sum(len(node.gpus) for node in launch.nodes),
            world_size=launch.job.world_size,
            reason=self.reason,
        )
        size = f"nodes {len(launch.nodes)} of {range_text(*self.job.node_range)}" if self.job.node_range else None
        self.to(
            states.STARTING,
            attempts=(*self.record.attempts, attempt),
            started_utc=self.record.started_utc or now,
            size=size,
        )

    def note_replacement(self, replacement: Replacement) -> None:
        """Record that workers were started again within the attempt."""
        self._change_last_attempt(replaced=(*self.record.attempts[-1].replaced, replacement))
        self._write()

    def close_attempt(self, outcome: Outcome, ended_utc: str | None = None) -> None:
        """Record the end of the last attempt (now by default), unless it is recorded already."""
        if not self.record.attempts or self.record.attempts[-1].ended_utc is not None:
            return
        cause = (
            outcome.failure.cause if outcome.failure else outcome.stopped or ("resized" if outcome.resized else None)
        )
        self._change_last_attempt(ended_utc=ended_utc or utc_now(), exit_codes=outcome.exit_codes, cause=cause)

    def note_engine_restart(self) -> None:
        """Record how the last attempt ended, after Slurm, for example, restarted the run.

        The cause is "preempted" if the run had received SIGTERM. Otherwise it is "node_lost".
        """
        if not self.record.attempts:
            return
        last = self.record.attempts[-1]
        # Nothing has recorded the end of a killed supervisor's attempt. Its last change of a file comes before the time in the
        # queue, which does not count towards the time limit.
        paths = [self.folder.state, *self.folder.attempt(last.number).glob("*"), *self.folder.metrics.glob("*")]
        seen_s = min(time.time(), max(path.lstat().st_mtime for path in paths))
        ended_utc = last.ended_utc or max(utc_at(seen_s), last.started_utc)
        if last.cause == "interrupted":
            self._change_last_attempt(cause="preempted", ended_utc=ended_utc)
        else:
            self.close_attempt(Outcome(stopped="node_lost"), ended_utc)

    def _note_interruption(self) -> None:
        if self.record.attempts and self.record.attempts[-1].ended_utc is None and not self.record.attempts[-1].cause:
            self._change_last_attempt(cause="interrupted")
            self._write()

    def _change_last_attempt(self, **changes: Any) -> None:
        *earlier, last = self.record.attempts
        last = replace(last, **changes)
        self.record = replace(self.record, attempts=(*earlier, last))

    # --- reasons to stop

    def start_clock(self) -> None:
        """Start the time limit `max_run_duration_seconds`, less the time of earlier attempts."""
        limit = self.job.max_run_duration_seconds
        if limit is not None:
            self._deadline = time.monotonic() + limit - sum(map(_duration_s, self.record.attempts))

    def stop_clock(self) -> None:
        """Stop the time limit, since the run is queued."""
        self._deadline = None

    @property
    def ends_at(self) -> float | None:
        """The Unix time at which the time limit ends the run, or None."""
        return None if self._deadline is None else time.time() + self._deadline - time.monotonic()

    def cancel_reason(self) -> str | None:
        """Return why a user or the engine has requested the run's end, or None.

        The reason is "cancel", "time_limit" (the engine's) or "interrupted" (the engine may start the run again).
        """
        if self.folder.cancel_request.exists():
            return "cancel"
        number = self.wake.stopped_by
        if number is None:
            return None
        if number == signal.SIGUSR2:
            return "time_limit"
        # An engine (such as Slurm) sends SIGTERM for a cancel, and for a preemption, after which it starts the job again. Leave
        # the record open unless this engine sends it only for a cancel: readers of the record ask the engine.
        may_return = self.folder.engine.exists() and remote_status.engine(self.folder).get("sigterm") != "cancel"
        return "interrupted" if may_return else "cancel"

    def stop_reason(self) -> str | None:
        """Return the reason to end the workers, or None.

        The reason comes from `cancel_reason`, or is "time_limit" (the run's own) or "preempted" (for another run).
        """
        self.claim.check()
        if (reason := self.cancel_reason()) is not None:
            if reason == "interrupted":
                self._note_interruption()
            return reason
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "time_limit"
        if self.may_leave and self.nodes is not None and time.monotonic() >= self._asks_at:
            self._asks_at = time.monotonic() + _ASK_S
            self.has_to_leave()
        return "preempted" if self.may_leave and self.leaves_for else None

    def may_leave_now(self) -> None:
        """Allow the run to return its nodes and queue again if another run needs them."""
        self.has_run, self.may_leave, self.leaves_for, self._asks_at = False, True, "", 0.0

    def has_to_leave(self) -> bool:
        """Return whether another run needs the nodes."""
        ask = getattr(self.nodes, "leave_reason", None)
        if ask is not None and not self.leaves_for:
            with contextlib.suppress(TargetError, EngineError, OSError):  # ask again later: the queue can't be read now
                self.leaves_for = ask()
        return bool(self.leaves_for)


def _duration_s(attempt: Attempt) -> float:
    if attempt.ended_utc is None:
        return 0.0
    return max(0.0, (parse_utc(attempt.ended_utc) - parse_utc(attempt.started_utc)).total_seconds())


class Wake:
    """A sleep that SIGCHLD, SIGTERM, SIGINT, SIGHUP and SIGUSR2 interrupt.

    stopped_by: The signal that requested the end of the run, or None. SIGUSR2 is an engine's warning that the job's
        time is nearly up.
    check: Called after each sleep, in which the machine may have been suspended.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self.check: Callable[[], None] = lambda: None
        # The self-pipe trick: a handler may run at any instruction, and must not take a lock that the interrupted code wants. It
        # writes a byte to a pipe that `sleep` waits for, so a signal just before the sleep is not lost.
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # The interpreter's C handler writes the byte. A full pipe is harmless: one byte is enough to wake `sleep`.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Don't block or ignore signals, which workers would inherit. Without a SIGCHLD handler, no byte would be written.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, self._stop)

    def heed(self, nodes: object) -> None:
        """Give these nodes the callbacks `poke` and `check`."""
        if hasattr(nodes, "on_news"):
            nodes.on_news = self.poke
        if hasattr(nodes, "check"):
            nodes.check = self.check

    def poke(self) -> None:
        """Interrupt a sleep. Any thread may call this method."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a signal or a message of a node arrives."""
        select.select([self._read], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        self.check()

    def _stop(self, number: int, frame: object) -> None:
        # Only the first signal counts, because an engine (such as Slurm) that warns by SIGUSR2 sends SIGTERM later.
        if self.stopped_by is None:
            self.stopped_by = number
