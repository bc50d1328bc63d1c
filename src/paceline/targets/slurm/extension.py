"""More nodes for an elastic run: a second job of Slurm's, whose nodes the supervisor in the first one uses as its own.

Slurm can't give a job that runs more nodes. To put it back into the queue with a larger wish would give up what it has, for two
minutes at least and for as long as others come first. So another job waits in the queue for it. Once that has begun, the
run takes its nodes over at its next checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.targets.slurm import submission
from paceline.targets.slurm.scheduler import Scheduler
from paceline.targets.slurm.script import extension_name, extension_text
from paceline.targets.slurm.states import expand

#: So long its nodes may wait for a checkpoint of the run's. Then they go back, for somebody else may need them.
_UNUSED_S = 900.0
_FORMAT = "%i|%T|%N"


@dataclass
class Extension:
    """The second job of a run. job_id, nodes: "" and none where there is none, or it waits."""

    scheduler: Scheduler
    run_id: str
    main_id: str
    job_id: str = ""
    nodes: tuple[str, ...] = ()
    _began: float = 0.0
    _gave_up: bool = False

    def look(self, job: Job, held: Collection[str]) -> int:
        """How many nodes there are beside those that the run holds; asks Slurm for some where there are none. Called by one
        thread at a time.

        Raises:
            EngineError: Slurm does not answer. TargetError: it refuses.
        """
        found = self._ask()
        more = [name for name in (*self._of_main(found, held), *self._own(found)) if name not in held]
        missing = job.node_count - len(held) - len(more)
        if self.job_id and self.nodes and not set(self.nodes) & set(held):
            self._began = self._began or time.monotonic()
            if time.monotonic() - self._began > _UNUSED_S:
                self.cancel()
                self._gave_up = True
                return 0
        if missing > 0 and not self.job_id and not self._gave_up:
            self._submit(job, missing, held)
        return len(more)

    def begin(self) -> None:
        """Another attempt begins."""
        self._began, self._gave_up = 0.0, False

    def current(self) -> tuple[str, ...]:
        """The nodes that the second job has now."""
        if self.job_id:
            with contextlib.suppress(EngineError, TargetError):
                self._own(self._ask())
        return self.nodes

    def cancel(self) -> None:
        """End the second job, if there is one."""
        if self.job_id:
            with contextlib.suppress(EngineError, TargetError):
                self.scheduler.call(["scancel", self.job_id])
        self.job_id, self.nodes = "", ()

    def _ask(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Number of a job -> state and nodes, of the two."""
        ids = ",".join(filter(None, (self.main_id, self.job_id)))
        done = self.scheduler.call(["squeue", "-h", "-r", "-j", ids, "-o", _FORMAT])
        if done.returncode != 0:
            raise EngineError(f"{self.scheduler.title}: squeue can't tell of jobs {ids}: {done.said}.")
        rows = [line.split("|") for line in done.stdout.splitlines()]
        return {row[0]: (row[1], tuple(expand(row[2])) if row[2] else ()) for row in rows if len(row) == 3}

    def _own(self, found: dict[str, tuple[str, tuple[str, ...]]]) -> Sequence[str]:
        state, nodes = found.get(self.job_id, ("", ()))
        self.nodes = nodes if state == "RUNNING" else ()
        if state not in ("RUNNING", "PENDING", "CONFIGURING"):
            self.job_id = ""  # it has reached its time limit, or somebody has ended it
        return self.nodes

    def _of_main(self, found: dict[str, tuple[str, tuple[str, ...]]], held: Collection[str]) -> list[str]:
        """Nodes of the run's own job that it does not hold though they live: their agent was killed, or they were cut off."""
        left = [name for name in found.get(self.main_id, ("", ()))[1] if name not in held]
        if not left:
            return []
        done = self.scheduler.call(["sinfo", "-h", "-N", "-n", ",".join(left), "-o", "%N|%T"])
        rows = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
        return [name for name in left if rows.get(name, "down") in ("allocated", "mixed", "idle")]

    def _submit(self, job: Job, count: int, held: Collection[str]) -> None:
        settings, exclude = self.scheduler.settings, sorted(held)
        script = extension_text(job, settings, run_id=self.run_id, job_id=self.main_id, count=count, exclude=exclude)
        name = extension_name(self.run_id)
        self.job_id = submission.submit(self.scheduler, script, name=name, user=submission.user_here())
