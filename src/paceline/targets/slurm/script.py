"""The batch scripts of runs, as pure functions of job and settings. --dry-run prints them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.job.plan import node_sizes
from paceline.targets.base import ALIKE_SPAN as SPAN
from paceline.targets.slurm.settings import SELECTING, SlurmSettings

#: Seconds that the supervisor has after the workers' grace period to write and fetch the last files.
_FINALIZE_S = 30
#: Memory in MiB requested for a sweep's controller, which needs at most 300 MB.
_CONTROLLER_MIB = 1024
#: Seconds before the time limit at which Slurm signals a controller to requeue its job. Slurm may signal a minute earlier.
_REQUEUE_S = 60
# Set bash's traps before starting the controller: a signal without a trap would end bash, which runs the controller.
_CONTROLLER_TRAPS = """\
controller= asked=
trap 'scontrol requeue "$SLURM_JOB_ID"' USR2
trap 'asked=1; [ -z "$controller" ] || kill -TERM $controller' TERM
"""
# The controller may be killed at any moment, because it has no state except the records of its trials.
_CONTROLLER_GOES_ON = """\
controller=$!
[ -z "$asked" ] || kill -TERM $controller
while kill -0 $controller 2>/dev/null; do wait $controller; code=$?; done
exit $code
"""
# squeue fails if Slurm has forgotten the job, but also if Slurm's controller is down. So exit after 15 minutes of failures.
_EXTENSION = """\
failed=0
while sleep 15; do
  if state=$(squeue -h -j {job_id} -o %T 2>/dev/null); then failed=0; else failed=$((failed + 1)); state=RUNNING; fi
  [ "$failed" -lt 60 ] || exit 0
  case "$state" in RUNNING|COMPLETING|SUSPENDED) ;; *) exit 0 ;; esac
done
"""
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def extension_name(run_id: str) -> str:
    """Return the name of a run's second Slurm job, which holds additional nodes."""
    return f"{job_name(run_id)}-more"


def job_name(run_id: str) -> str:
    """Return the name of a run's Slurm job."""
    return f"paceline-{run_id}"


def sbatch_text(
    job: Job, settings: SlurmSettings, *, run_id: str, run_dir: PurePosixPath, library_dir: PurePosixPath, python: str
) -> str:
    """Return a run's batch script. Paths and `python` are valid on the nodes.

    Raises:
        TargetError: A path has a character that an #SBATCH line can't have.
    """
    options = [
        f"--job-name={job_name(run_id)}",
        f"--comment=paceline run {run_id}",
        f"--chdir={run_dir}",
        f"--output={_literal(run_dir / 'logs' / 'driver.log')}",
        *_options_of_job(job, settings),
    ]
    return _text(options, settings, shlex.quote(run_id), shlex.quote(str(run_dir)), library_dir, python)


def array_text(
    job: Job, settings: SlurmSettings, array: Array, *, runs_dir: PurePosixPath, library_dir: PurePosixPath, python: str
) -> str:
    """Return the batch script of a job array whose tasks are similar runs.

    Raises:
        TargetError: A path has a character that an #SBATCH line can't have.
    """
    options = [
        f"--job-name={job_name(array.name)}",
        f"--comment=paceline runs {array.name}",
        array.option,
        # All tasks of the array start in this folder. Each task then changes to its own run's folder.
        f"--chdir={runs_dir}",
        f"--output={_literal(runs_dir)}/{array.file_pattern}/logs/driver.log",
        *_options_of_job(job, settings),
    ]
    run_dir = f'{shlex.quote(str(runs_dir))}/"{array.shell_word}"'
    return _text(options, settings, '"${PWD##*/}"', run_dir, library_dir, python)


def controller_text(
    settings: SlurmSettings, *, run_id: str, run_dir: PurePosixPath, library_dir: PurePosixPath, python: str
) -> str:
    """Return the batch script of a sweep's controller.

    Raises:
        TargetError: A path has a character that an #SBATCH line can't have.
    """
    options = [
        f"--job-name={job_name(run_id)}",
        f"--comment=paceline sweep {run_id}",
        f"--chdir={run_dir}",
        f"--output={_literal(run_dir / 'logs' / 'driver.log')}",
        "--open-mode=append",
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--mem={_CONTROLLER_MIB}M"),
        f"--signal=B:USR2@{_REQUEUE_S}",
        "--requeue",
    ]
    places = {name: getattr(settings, name) for name in ("partition", "account", "qos", "reservation")}
    options += [f"--{name}={value}" for name, value in places.items() if value is not None]
    its_dir = shlex.quote(str(run_dir))
    start = _begin(options, settings, shlex.quote(run_id), its_dir, library_dir)
    command = f"{shlex.quote(python)} -m paceline.sweeps {its_dir} &"
    return f"{start}{_CONTROLLER_TRAPS}{command}\n{_CONTROLLER_GOES_ON}"


def extension_text(
    job: Job, settings: SlurmSettings, *, run_id: str, job_id: str, count: int, exclude: Sequence[str]
) -> str:
    """Return the batch script that holds more nodes for an elastic run.

    count: The most nodes to request; the job starts with one node or more.
    exclude: Nodes that the run has already, which Slurm might choose again if they have room.
    """
    own = replace(settings, nodelist=None, exclude=",".join([*exclude, *filter(None, [settings.exclude])]))
    options = [
        f"--job-name={extension_name(run_id)}",
        f"--comment=paceline run {run_id}, more nodes",
        *("--output=/dev/null", "--chdir=/", f"--nodes=1-{count}", *_cpus_of_node(job, settings)),
        *("--no-kill", "--no-requeue"),
        *selecting_options(own, _gres(job, settings)),
    ]
    return "\n".join(_head(options)) + "\n" + _EXTENSION.format(job_id=shlex.quote(job_id))


def _text(
    options: list[str], settings: SlurmSettings, run_id: str, run_dir: str, library_dir: PurePosixPath, python: str
) -> str:
    # Use `exec` to replace the shell, because Slurm signals the coming time limit only to the batch script's own process.
    return (
        f"{_begin(options, settings, run_id, run_dir, library_dir)}"
        f"exec {shlex.quote(python)} -m paceline.supervisor {run_dir}\n"
    )


def _begin(options: list[str], settings: SlurmSettings, run_id: str, run_dir: str, library_dir: PurePosixPath) -> str:
    """Return a batch script's beginning, without the command. `run_id` and `run_dir` are shell-quoted."""
    lines = [
        *_head(options),
        "",
        *settings.setup,
        f"cd {run_dir} || exit 1",
        # Keep the workers' PYTHONPATH in another variable, since the supervisor needs a different one.
        'export PACELINE_SHELL_PYTHONPATH="${PYTHONPATH-}"',
        f"export PYTHONPATH={shlex.quote(str(library_dir))} PACELINE_SUPERVISOR={run_id}",
        # If a worker of another run submits this job, drop the variables that would mark the job's processes as part of that run.
        "unset PACELINE_RUN_DIR PACELINE_RUN_ID",
    ]
    return "\n".join(lines) + "\n"


def _head(options: list[str]) -> list[str]:
    return ["#!/bin/bash", *(f"#SBATCH {_escaped(option)}" for option in options)]


def warning_s(job: Job, settings: SlurmSettings) -> int:
    """Return how many seconds before the time limit Slurm warns the supervisor."""
    wanted = math.ceil(job.grace_period_seconds) + _FINALIZE_S
    limit = settings.time_s
    # A warning at the start of a short job would be useless. So let Slurm warn at most a third of the time limit before the end.
    return max(1, min(wanted, 65535, int(limit / 3) if limit is not None else wanted))


def _literal(path: PurePosixPath) -> str:
    if "\\" in str(path):
        raise TargetError(
            f"the run's folder {str(path)!r} has a backslash in its path, which Slurm takes out of names of output "
            "files. Use a workspace elsewhere."
        )
    # Write % as %%, because a single % begins a pattern, such as %j for the job's number.
    return str(path).replace("%", "%%")


def _options_of_job(job: Job, settings: SlurmSettings) -> Iterator[str]:
    yield "--open-mode=append"
    yield f"--nodes={'-'.join(map(str, job.node_range or (job.node_count,)))}"
    if job.node_range:
        # With --no-kill, a job that has lost a node keeps its other nodes. If the first node is lost, Slurm requeues the job.
        yield "--no-kill"
        yield from _cpus_of_node(job, settings)
    else:
        yield f"--ntasks-per-node={max(node_sizes(job))}"
        yield f"--cpus-per-task={settings.cpus_per_process}"
    yield f"--signal=B:USR2@{warning_s(job, settings)}"
    yield "--requeue" if job.max_restarts or job.node_range else "--no-requeue"
    yield from selecting_options(settings, _gres(job, settings))


def _cpus_of_node(job: Job, settings: SlurmSettings) -> Iterator[str]:
    """Yield an elastic run's sbatch options that give a node's cores to one task.

    With several tasks per node, Slurm would compute the number of tasks from the minimum of nodes, and never give more.
    """
    yield f"--cpus-per-task={settings.cpus_per_process * max(node_sizes(job))}"


def selecting_options(settings: SlurmSettings, gres: str | None) -> Iterator[str]:
    """Yield the sbatch options, unescaped, for nodes, account and time."""
    named = {name: getattr(settings, setting) for name, setting in SELECTING.items()}
    yield from (f"--{name}={value}" for name, value in {**named, "gres": gres}.items() if value is not None)
    if settings.exclusive:
        yield "--exclusive"
    yield from settings.options


def _gres(job: Job, settings: SlurmSettings) -> str | None:
    if not job.use_gpu or settings.asks_for_gpus:
        return settings.gres
    kind = f":{settings.gpu_type}" if settings.gpu_type else ""
    gpus = f"gpu{kind}:{max(node_sizes(job))}"
    return f"{settings.gres},{gpus}" if settings.gres else gpus


def _escaped(option: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", option):
        raise TargetError(
            f"{option!r} has a line break or control character, which no line of an sbatch script can carry. Leave it out."
        )
    if _PLAIN.fullmatch(option):
        return option
    # Escape for sbatch, not for a shell: in double quotes sbatch takes the character after a backslash literally.
    return '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


@dataclass(frozen=True, kw_only=True)
class Array:
    """A job array with one task for each run.

        runs <sweep>_0 ... <sweep>_7          --array=0-7                task n runs <sweep>_<n>
        runs <sweep>_2040 ... <sweep>_2047    --array=40-47              task n runs <sweep>_2<n, three digits>

    The task number identifies the run in the script and in the output file's name, where Slurm can only add leading zeros.
    A task number lacks the thousands of the run's number, because Slurm's default MaxArraySize allows at most 1000.
    """

    parent: str
    first: int
    last: int
    at_once: int

    @classmethod
    def of(cls, run_ids: Sequence[str], at_once: int) -> Array:
        """Return a job array for trials of one sweep that have consecutive numbers."""
        parent, _, first = run_ids[0].rpartition("_")
        found = cls(parent=parent, first=int(first), last=int(first) + len(run_ids) - 1, at_once=at_once)
        assert list(run_ids) == [f"{parent}_{number}" for number in range(found.first, found.last + 1)], run_ids
        assert found.first // SPAN == found.last // SPAN, run_ids
        return found

    @property
    def name(self) -> str:
        """The end of the job array's name: sweep's id, first and last trial numbers."""
        return f"{self.parent}_{self.first}-{self.last}"

    @property
    def tasks(self) -> range:
        """The numbers of the array's tasks, in the order of the runs."""
        return range(self.first % SPAN, self.last % SPAN + 1)

    @property
    def option(self) -> str:
        tasks = self.tasks
        limit = f"%{self.at_once}" if self.at_once < len(tasks) else ""
        return f"--array={tasks[0]}-{tasks[-1]}{limit}"

    @property
    def file_pattern(self) -> str:
        """The run id of a task, in sbatch's syntax for output file names."""
        thousands = self.first // SPAN
        return f"{self.parent.replace('%', '%%')}_{f'{thousands}%3a' if thousands else '%a'}"

    @property
    def shell_word(self) -> str:
        """The run id of a task, as bash code for use within double quotes."""
        return f"{self.parent}_$(({self.first // SPAN * SPAN} + SLURM_ARRAY_TASK_ID))"


def listed_id(environment: Mapping[str, str]) -> str:
    """Return this process's job id as squeue lists it (`<array>_<task>`), or ""."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
