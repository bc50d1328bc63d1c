"""Submit batch scripts exactly once in spite of failures; hold more nodes for elastic runs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.targets.slurm.scheduler import AwayError, CommandResult, Scheduler, plain
from paceline.targets.slurm.script import extension_name, extension_text
from paceline.targets.slurm.settings import SELECTING, SlurmSettings
from paceline.targets.slurm.states import SQUEUE_FORMAT, expand, parse_squeue

#: Errors of `sbatch --test-only` that are temporary: sbatch itself accepts the job nevertheless.
_NOT_NOW = re.compile(
    r"Required node not available|not available now|nodes are busy|is down|currently unavailable|Job violates accounting",
    re.IGNORECASE,
)
_UNAVAILABLE = "Requested node configuration is not available"
#: If a call of sbatch took more seconds than this, it has waited for Slurm's controller.
_SLOW_S = 3.0
#: Variables that sbatch would read from the submitting shell as options. The job's script has its options in its text.
_SBATCH_VARIABLES = frozenset(
    f"SBATCH_{name}"
    for name in (
        *("ARRAY_INX", "EXPORT", "IGNORE_PBS", "INPUT", "JOB_NAME", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT"),
        *("ERROR", "REQUEUE", "SIGNAL", "WAIT", "WAIT_ALL_NODES", "WCKEY", "CLUSTERS", "OVERCOMMIT", "DEBUG"),
    )
)
#: Name of a setting -> the environment variable with the user's default value. The setting takes precedence.
_OF_SETTINGS = {
    **{name: name.upper() for name in ("partition", "account", "qos", "constraint", "gres", "reservation")},
    "time": "TIMELIMIT",
}

#: Seconds for which additional nodes of an elastic run may wait for the run's next checkpoint before they are returned.
_UNUSED_S = 900.0
_FORMAT = "%i|%T|%N"


def try_out(scheduler: Scheduler, script: str, *, lacks_nodes: Callable[[], bool] = lambda: False) -> None:
    """Let Slurm check a batch script without submitting it.

    lacks_nodes: Returns whether some nodes are down or reserved. Slurm's check then reports missing nodes, although
    sbatch would accept the job.

    Raises:
        TargetError: Slurm would refuse the job; the message has Slurm's error and the request.
    """
    argv, begun = ["sbatch", "--test-only"], time.monotonic()
    try:
        done = scheduler.call(argv, input=script, environment=environment(os.environ, scheduler.settings))
    except AwayError:
        return  # skip this test: the submission itself waits for the controller
    # Right after a restart, a controller does not know its nodes. So ignore an error about missing nodes after an outage.
    was_away = time.monotonic() - begun > _SLOW_S
    if done.returncode == 0 or was_away or _NOT_NOW.search(done.stderr):
        return
    if not (_UNAVAILABLE in done.stderr and lacks_nodes()):
        raise TargetError(_refusal(scheduler.title, done, script))


def submit(
    scheduler: Scheduler, script: str, *, name: str, user: str, tell: Callable[[str], None] | None = None
) -> str:
    """Submit a batch script, retrying while Slurm is down. Return the job's number.

    name: The job's name, by which the job is found if sbatch's answer is lost.
    user: The user's uid or name, as for `squeue -u`. tell: Called with an error text while Slurm does not answer.

    Raises:
        EngineError, TargetError: Slurm does not answer for minutes, or refuses the job.
    """
    tried: list[float] = []

    def once() -> CommandResult:
        if tried:
            # Look for the job first: the last call may have submitted it although its answer was lost.
            found = _find(scheduler, name, user)
            if found is not None:
                return CommandResult(returncode=0, stdout=found, stderr="")
        tried.append(time.monotonic())
        variables = environment(os.environ, scheduler.settings)
        return scheduler.call(["sbatch", "--parsable"], input=script, environment=variables)

    done = scheduler.call_patiently(once, tell=tell)
    # sbatch prints the job's number, or `job;cluster` on a site with several clusters.
    found = re.search(r"^(\d+)(;\S+)?\s*$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        raise TargetError(_refusal(scheduler.title, done, script))
    return found[1]


def environment(shell: Mapping[str, str], settings: SlurmSettings) -> dict[str, str]:
    """Return the submitting shell's environment, without variables of other jobs."""
    set_here = {f"SBATCH_{name}" for setting, name in _OF_SETTINGS.items() if getattr(settings, setting) is not None}
    if settings.memory is not None:
        set_here |= {"SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"}
    return {
        name: value
        for name, value in plain(shell).items()
        if name not in _SBATCH_VARIABLES | set_here
        and (not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")) or name == "SLURM_CONF")
    }


def _find(scheduler: Scheduler, name: str, user: str) -> str | None:
    argv = ["squeue", "-h", "-r", "-u", user, "-t", "all", f"--name={name}", "-o", SQUEUE_FORMAT]
    done = scheduler.call(argv)
    if done.returncode != 0:
        raise AwayError(f"squeue can't say whether the job is there: {done.said}.")
    jobs = [job for job in parse_squeue(done.stdout) if job.name == name]
    # Cut off an array task's number: squeue lists tasks such as 123_4.
    return jobs[-1].job_id.partition("_")[0] if jobs else None


def _refusal(title: str, done: CommandResult, script: str) -> str:
    said = re.sub(r"^(Batch job submission failed|allocation failure): ", "", done.said)
    said = re.sub(r"; (Batch job submission failed|allocation failure): ", "; ", said)
    asked = re.findall(r'^#SBATCH "?(--[^\n]*?)"?$', script, re.MULTILINE)
    own = ("job-name", "comment", "chdir", "output", "open-mode", "signal", "requeue", "no-requeue")
    shown = [option for option in asked if option[2:].split("=")[0] not in own]
    named = [option for option in shown if option[2:].split("=")[0] in SELECTING]
    settings = ", ".join(shown) if shown else "nothing"
    which = " See the settings of the target: `paceline compute show`." if named else ""
    return f"{title}: Slurm refuses the job: {said.rstrip('.')}. Asked for: {settings}.{which}"


def user_here() -> str:
    """Return this user's uid for squeue, as containers may lack the name."""
    return str(os.geteuid())


@dataclass
class Extension:
    """An elastic run's second job, which provides additional nodes to the run.

    Slurm can't give a running job more nodes, and requeuing it with a larger request would lose its nodes for two
    minutes. So a second job waits in the queue, and the run takes over that job's nodes at its next checkpoint.

    job_id is empty without a second job; nodes is empty while the second job waits.
    """

    scheduler: Scheduler
    run_id: str
    main_id: str
    job_id: str = ""
    nodes: tuple[str, ...] = ()
    _began: float = 0.0
    _gave_up: bool = False

    def look(self, job: Job, held: Collection[str]) -> int:
        """Return how many more nodes the run could have. Submit the second Slurm job if needed.

        held: Names of the nodes that the run uses now.

        Raises:
            EngineError: Slurm does not answer.
            TargetError: Slurm refuses the second job.
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
        """Allow a second Slurm job for more nodes in the new attempt."""
        self._began, self._gave_up = 0.0, False

    def current(self) -> tuple[str, ...]:
        """Return the additional nodes' names; empty while their Slurm job is queued."""
        if self.job_id:
            with contextlib.suppress(EngineError, TargetError):
                self._own(self._ask())
        return self.nodes

    def cancel(self) -> None:
        """Cancel the run's second Slurm job, if it exists."""
        if self.job_id:
            with contextlib.suppress(EngineError, TargetError):
                self.scheduler.call(["scancel", self.job_id])
        self.job_id, self.nodes = "", ()

    def _ask(self) -> dict[str, tuple[str, tuple[str, ...]]]:
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
            self.job_id = ""  # the job of the additional nodes was canceled, or reached its time limit
        return self.nodes

    def _of_main(self, found: dict[str, tuple[str, tuple[str, ...]]], held: Collection[str]) -> list[str]:
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
        self.job_id = submit(self.scheduler, script, name=name, user=user_here())
