"""Start MPI workers by `srun --mpi=pmix`, if the cluster supports it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.job.plan import Starter, places
from paceline.job.sizes import range_text
from paceline.targets.slurm.scheduler import CommandResult, Scheduler
from paceline.targets.slurm.settings import SlurmSettings

_PLUGIN = re.compile(r"\b(?:none|openmpi|pmi2|cray_shasta|pmix(?:_v\d+)?)\b")
#: Prefixes of the supervisor's variables that srun and its PMIx plugin need.
_FOR_SRUN = ("SLURM_CONF", "SLURM_PMIX_")


def uses_srun(job: Job, settings: SlurmSettings) -> bool:
    """Return whether srun starts the job's MPI workers."""
    return job.launcher == "mpi" and settings.mpi != "mpirun"


def check_srun(job: Job, scheduler: Scheduler) -> None:
    """Raise an error if srun can't start the job's MPI workers.

    Raises:
        TargetError: The cluster lacks the PMIx plugin, the job is elastic, or workers run in containers.
    """
    settings, title = scheduler.settings, scheduler.title
    if not uses_srun(job, settings):
        return
    if job.node_range is not None:
        raise TargetError(
            f"node_count={range_text(*job.node_range)}: {title} has mpi={settings.mpi!r}, and what srun starts is of one job, "
            "while an elastic run's nodes come from several. Set mpi='mpirun', or choose another backend, or one number."
        )
    if job.environment.docker_image is not None:
        raise TargetError(
            f"{title} has mpi={settings.mpi!r}, which starts no workers in containers "
            f"(custom_docker_image={job.environment.docker_image!r}). Set mpi='mpirun', or choose another backend."
        )
    plugins = plugins_in(scheduler.call(["srun", "--mpi=list"]))
    if settings.mpi not in plugins:
        raise TargetError(
            f"{title} has mpi={settings.mpi!r}, but this Slurm's srun has no such plugin; it has "
            f"{', '.join(plugins) or 'none'}. Set mpi='mpirun', which needs nothing of Slurm's, or ask for Slurm with PMIx."
        )


def plugins_in(listed: CommandResult) -> list[str]:
    """Return the plugins that the output of `srun --mpi=list` names.

    Before Slurm 22.05 the list is on standard error, later on standard output, before a sentence on pmix's versions.
    """
    text = re.sub(r"(?m)^specific pmix plugin versions available:", "", f"{listed.stdout}\n{listed.stderr}")
    return list(dict.fromkeys(_PLUGIN.findall(text)))


def starter(
    job: Job, settings: SlurmSettings, job_id: str, nodes: Sequence[str], environment: Mapping[str, str] | None = None
) -> Starter | None:
    """Return the srun command line that starts all workers; None for mpirun.

    nodes: Names of the nodes, by node rank.
    environment: The supervisor's environment; None if the command line is only displayed.

    Raises:
        TargetError: This node has no srun.
    """
    if not uses_srun(job, settings):
        return None
    srun = "srun" if environment is None else shutil.which("srun", path=environment.get("PATH"))
    if srun is None:
        raise TargetError(f"mpi={settings.mpi!r}: node {nodes[0]} has no srun on its PATH. Set mpi='mpirun'.")
    planned = places(job)
    return Starter(
        argv=(
            *(srun, f"--jobid={job_id}", "--overlap", "--mem=0", f"--mpi={settings.mpi}", "--cpu-bind=none"),
            # Allow different numbers of workers on the nodes, which only --distribution=arbitrary does.
            *(f"--nodes={len(nodes)}", f"--ntasks={len(planned)}", "--distribution=arbitrary"),
            f"--nodelist={','.join(nodes[place.node_rank] for place in planned)}",
            # Keep srun from killing all workers when one worker ends: Paceline handles failures, and workers may end hours apart.
            *("--wait=0", "--kill-on-bad-exit=0", "--input=none", "--export=ALL", "--immediate=30"),
            "--job-name=paceline-workers",
        ),
        environment={name: text for name, text in (environment or {}).items() if name.startswith(_FOR_SRUN)},
    )
