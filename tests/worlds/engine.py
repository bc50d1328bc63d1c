"""A simulated engine, such as Slurm, which starts a run's supervisor in its job, interrupts it, and may answer falsely."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from paceline.errors import EngineError
from paceline.runs import remote_status
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, JobStatus
from tests.worlds.kernel import Host, Kernel, Process


class Engine:
    """The engine's view of one job.

    begin: Starts the supervisor on a host, and returns its guardian and the supervisor.
    """

    def __init__(
        self, kernel: Kernel, chance: random.Random, begin: Callable[[Host], tuple[Process, list[Process]]]
    ) -> None:
        self.kernel, self.chance, self._begin = kernel, chance, begin
        self.state, self.cause, self.by = QUEUED, "engine", None
        self.queue_s, self.kill_wait_s = chance.choice((0.1, 2.0)), chance.choice((1.0, 5.0))
        self.is_slow = chance.random() < 0.3
        self.host = Host("head")
        self.guardian: Process | None = None
        self.all: list[Process] = []
        self.starts = 0
        #: (time, answer): until this time the engine gives this answer, which may be false. "unreachable" means that it
        #: gives no answer.
        self.lie: tuple[float, str] = (0.0, "")
        #: (time, true status of the job), from which the engine can give an old answer.
        self.history: list[tuple[float, JobStatus]] = []
        self.tells("queued")

    def submit(self, folder: RunFolder) -> None:
        remote_status.note_engine(folder, "slurm", job_id="7")
        self.kernel.after(self.queue_s, self.start)

    def tells(self, state: str, cause: str = "engine", by: str | None = None) -> None:
        self.state = state
        self.history.append((self.kernel.now, JobStatus(state=state, cause=cause, by=by)))

    def start(self) -> None:
        """Start the job, unless it was canceled."""
        if self.state != QUEUED:
            return
        self.starts += 1
        self.kernel.note(f"engine starts the job, {self.starts}")
        self.host = Host(f"head{self.starts}")
        self.tells(RUNNING)
        self.guardian, self.all = self._begin(self.host)
        before, guardian = self.guardian.on_end, self.guardian

        def ended() -> None:
            before()
            if self.guardian is guardian and self.state == RUNNING:
                self.tells(GONE)

        self.guardian.on_end = ended

    # --- faults

    def interrupt(self) -> str | None:
        """Preempt the job by SIGTERM and later SIGKILL, and queue it again. Return a description, None if it does not run."""
        if self.state != RUNNING or self.guardian is None or not self.guardian.is_alive:
            return None
        guardian = self.guardian
        guardian.deliver(signal.SIGTERM)
        self.guardian = None
        self.kernel.after(self.kill_wait_s, lambda: self._again(self.all))
        return f"kills after {self.kill_wait_s} s"

    def _again(self, processes: list[Process]) -> None:
        for process in processes:
            process.deliver(signal.SIGKILL)
        if self.state == RUNNING:
            self.tells(QUEUED)
            self.kernel.after(self.queue_s, self.start)

    def lose(self, *, again: bool) -> str | None:
        """Lose the supervisor's machine, and perhaps start the job again. Return a description, None if it does not run."""
        if self.state != RUNNING:
            return None
        self.guardian = None
        for process in self.all:
            process.deliver(signal.SIGKILL)
        if again:
            self._again([])
        else:
            self.tells(GONE, "node_lost")
        return "and starts the job again" if again else "for ever"

    def cut_off(self) -> str | None:
        """Suspend the supervisor's machine, and start the job again on another one. Its lock may get lost."""
        if self.state != RUNNING or self.guardian is None or not self.guardian.is_alive:
            return None
        lasts_s, loses_s = self.chance.choice((5.0, 30.0, 150.0)), self.chance.choice((1.0, 3.0, None))
        self.host.resumes_at, self.guardian = self.kernel.now + lasts_s, None
        if loses_s is not None:
            locks = sorted({lock for process in self.all if process.is_alive for lock in process.locks})
            self.kernel.after(loses_s, lambda: [self.kernel.unlock(lock) for lock in locks])
        self._again([])
        return f"for {lasts_s} s, its lock is lost after {loses_s} s"

    # --- the target's answers

    def look(self) -> JobStatus:
        kernel = self.kernel
        if self.is_slow:
            kernel.sleep(kernel.random() * 2.0)
        until, told = self.lie
        if kernel.now < until:
            if told == "unreachable":
                raise EngineError("the engine does not answer.")
            if told == "old":
                old = [status for at_s, status in self.history if at_s <= kernel.now - 5.0]
                return old[-1] if old else self.history[0][1]
            return JobStatus(state=told)
        return self.history[-1][1]

    def cancel(self, by: str | None) -> None:
        if self.state == QUEUED:
            self.tells(GONE, "cancel", by)
