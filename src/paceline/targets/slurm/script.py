"""The batch script of a run: a pure function of job and settings. What `--dry-run` prints, and what sbatch is given."""

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

#: Beside the workers' grace: for the last files to be written and fetched.
_FINALIZE_S = 30
#: Of a sweep's controller, which takes 300 MB at most.
_CONTROLLER_MIB = 1024
#: Before the time limit, when it goes on in the job's next life. Slurm may be a minute early.
_REQUEUE_S = 60
# Before it begins: a signal that bash has no trap for ends bash.
_CONTROLLER_TRAPS = """\
controller= asked=
trap 'scontrol requeue "$SLURM_JOB_ID"' USR2
trap 'asked=1; [ -z "$controller" ] || kill -TERM $controller' TERM
"""
# The children are all that it knows, so it may be ended at any moment.
_CONTROLLER_GOES_ON = """\
controller=$!
[ -z "$asked" ] || kill -TERM $controller
while kill -0 $controller 2>/dev/null; do wait $controller; code=$?; done
exit $code
"""
# squeue fails for a job that is forgotten, and while the controller is away: a quarter of an hour of that is the end, too.
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
    """The name of a job that holds more nodes for a run's."""
    return f"{job_name(run_id)}-more"


def job_name(run_id: str) -> str:
    """The name by which a run's job is found when its number was lost."""
    return f"paceline-{run_id}"


def sbatch_text(
    job: Job,
    settings: SlurmSettings,
    *,
    run_id: str,
    run_dir: PurePosixPath,
    library_dir: PurePosixPath,
    python: str,
) -> str:
    """The whole script. Paths and python: as the nodes see them.

    Raises:
        TargetError: a path that a line of sbatch's can't carry.
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
    job: Job,
    settings: SlurmSettings,
    array: Array,
    *,
    runs_dir: PurePosixPath,
    library_dir: PurePosixPath,
    python: str,
) -> str:
    """The whole script of runs that differ in nothing that Slurm is told, as tasks of an array. Paths as for `sbatch_text`.

    Raises:
        TargetError: a path that a line of sbatch's can't carry.
    """
    options = [
        f"--job-name={job_name(array.name)}",
        f"--comment=paceline runs {array.name}",
        array.option,
        # The tasks have one in common; each then goes to its own.
        f"--chdir={runs_dir}",
        f"--output={_literal(runs_dir)}/{array.file_pattern}/logs/driver.log",
        *_options_of_job(job, settings),
    ]
    run_dir = f'{shlex.quote(str(runs_dir))}/"{array.shell_word}"'
    return _text(options, settings, '"${PWD##*/}"', run_dir, library_dir, python)


def controller_text(
    settings: SlurmSettings, *, run_id: str, run_dir: PurePosixPath, library_dir: PurePosixPath, python: str
) -> str:
    """The whole script of a sweep's controller: one core, whatever the trials have. Paths as for `sbatch_text`.

    Raises:
        TargetError: a path that a line of sbatch's can't carry.
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
    """The whole script of a job that does nothing: its nodes are for another job, that of an elastic run, and it ends with that.

    count: of nodes at most; one is enough. exclude: nodes that the run has already, on which there may be room for it, too.
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
    """The script of a run, or of each run of an array."""
    # In the shell's place: Slurm's warning of the time limit goes to the script's own process alone.
    return (
        f"{_begin(options, settings, run_id, run_dir, library_dir)}"
        f"exec {shlex.quote(python)} -m paceline.supervisor {run_dir}\n"
    )


def _begin(options: list[str], settings: SlurmSettings, run_id: str, run_dir: str, library_dir: PurePosixPath) -> str:
    """The script up to its command. run_id, run_dir: as bash reads them; run_id is read in the run's folder."""
    lines = [
        *_head(options),
        "",
        *settings.setup,
        f"cd {run_dir} || exit 1",
        # What the workers' PYTHONPATH was, which the supervisor's stands in for.
        'export PACELINE_SHELL_PYTHONPATH="${PYTHONPATH-}"',
        f"export PYTHONPATH={shlex.quote(str(library_dir))} PACELINE_SUPERVISOR={run_id}",
        # A worker that submits must not pass for its new run's.
        "unset PACELINE_RUN_DIR PACELINE_RUN_ID",
    ]
    return "\n".join(lines) + "\n"


def _head(options: list[str]) -> list[str]:
    """The lines that sbatch reads, an option on each."""
    return ["#!/bin/bash", *(f"#SBATCH {_escaped(option)}" for option in options)]


def warning_s(job: Job, settings: SlurmSettings) -> int:
    """Seconds before the time limit at which the supervisor is warned. Slurm may be a minute early."""
    wanted = math.ceil(job.grace_period_seconds) + _FINALIZE_S
    limit = settings.time_s
    # Of a short job's time the warning takes a third at most: one that came at the start would be worse than none.
    return max(1, min(wanted, 65535, int(limit / 3) if limit is not None else wanted))


def _literal(path: PurePosixPath) -> str:
    """The path as sbatch's names of output files have it."""
    if "\\" in str(path):
        raise TargetError(
            f"the run's folder {str(path)!r} has a backslash in its path, which Slurm takes out of names of output "
            "files. Use a workspace elsewhere."
        )
    # %% is a %; a lone one would be taken for the job's number or the like.
    return str(path).replace("%", "%%")


def _options_of_job(job: Job, settings: SlurmSettings) -> Iterator[str]:
    yield "--open-mode=append"
    yield f"--nodes={'-'.join(map(str, job.node_range or (job.node_count,)))}"
    if job.node_range:
        # A job that has lost a node keeps the others. One that has lost its first, where the supervisor is, is requeued.
        yield "--no-kill"
        yield from _cpus_of_node(job, settings)
    else:
        yield f"--ntasks-per-node={max(node_sizes(job))}"
        yield f"--cpus-per-task={settings.cpus_per_process}"
    yield f"--signal=B:USR2@{warning_s(job, settings)}"
    yield "--requeue" if job.max_restarts or job.node_range else "--no-requeue"
    yield from selecting_options(settings, _gres(job, settings))


def _cpus_of_node(job: Job, settings: SlurmSettings) -> Iterator[str]:
    """The cores of a node as those of one task, where there is a range of nodes: with a number of tasks for each node, Slurm
    takes that of the fewest nodes for the number of all tasks, and gives no more nodes than that.
    """
    yield f"--cpus-per-task={settings.cpus_per_process * max(node_sizes(job))}"


def selecting_options(settings: SlurmSettings, gres: str | None) -> Iterator[str]:
    """The options, not escaped, that say which nodes, at whose cost and for how long."""
    named = {name: getattr(settings, setting) for name, setting in SELECTING.items()}
    for name, value in {**named, "gres": gres}.items():
        if value is not None:
            yield f"--{name}={value}"
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
    """The text as sbatch reads it back: words end at a space, quotes and `#` have a meaning, a backslash takes it away."""
    if re.search(r"[\x00-\x1f\x7f]", option):
        raise TargetError(
            f"{option!r} has a line break or control character, which no line of an sbatch script can carry. Leave it out."
        )
    if _PLAIN.fullmatch(option):
        return option
    # Quotes of one kind, within which a backslash takes the meaning of the next character. None of it is a shell's.
    return '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


@dataclass(frozen=True, kw_only=True)
class Array:
    """Runs `<parent>_<first>` to `<parent>_<last>`; at_once: so many run at a time."""

    parent: str
    first: int
    last: int
    at_once: int

    @classmethod
    def of(cls, run_ids: Sequence[str], at_once: int) -> Array:
        """The array of runs whose ids are a parent's with numbers that follow each other, all of one span."""
        parent, _, first = run_ids[0].rpartition("_")
        found = cls(parent=parent, first=int(first), last=int(first) + len(run_ids) - 1, at_once=at_once)
        assert list(run_ids) == [f"{parent}_{number}" for number in range(found.first, found.last + 1)], run_ids
        assert found.first // SPAN == found.last // SPAN, run_ids
        return found

    @property
    def name(self) -> str:
        """Stands for a run's id in the name of the job."""
        return f"{self.parent}_{self.first}-{self.last}"

    @property
    def tasks(self) -> range:
        """The numbers of its tasks, in order of its runs."""
        return range(self.first % SPAN, self.last % SPAN + 1)

    @property
    def option(self) -> str:
        tasks = self.tasks
        limit = f"%{self.at_once}" if self.at_once < len(tasks) else ""
        return f"--array={tasks[0]}-{tasks[-1]}{limit}"

    @property
    def file_pattern(self) -> str:
        """The run's id as sbatch's names of output files have it."""
        thousands = self.first // SPAN
        return f"{self.parent.replace('%', '%%')}_{f'{thousands}%3a' if thousands else '%a'}"

    @property
    def shell_word(self) -> str:
        """The run's id as bash reads it, within double quotes."""
        return f"{self.parent}_$(({self.first // SPAN * SPAN} + SLURM_ARRAY_TASK_ID))"


def listed_id(environment: Mapping[str, str]) -> str:
    """The job that a process is in, as squeue lists it: of a task `<array>_<task>`; "" where it is in none."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
