"""MPI's workers by `srun --mpi=pmix`: whether the cluster can, and the command line that does."""

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
#: For srun and its plugin, of what the supervisor found in its environment.
_FOR_SRUN = ("SLURM_CONF", "SLURM_PMIX_")


def uses_srun(job: Job, settings: SlurmSettings) -> bool:
    """True if srun is to start the job's workers, as MPI's."""
    return job.launcher == "mpi" and settings.mpi != "mpirun"


def check_srun(job: Job, scheduler: Scheduler) -> None:
    """Refuse a job whose workers srun can't start as MPI's here.

    Raises:
        TargetError: the cluster has no such plugin, or the job's workers are to run in containers.
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
    """The plugins that `srun --mpi=list` names: a line each on standard error before Slurm 22.05, since then on standard
    output, the versions of pmix behind a sentence.
    """
    text = re.sub(r"(?m)^specific pmix plugin versions available:", "", f"{listed.stdout}\n{listed.stderr}")
    return list(dict.fromkeys(_PLUGIN.findall(text)))


def starter(
    job: Job, settings: SlurmSettings, job_id: str, nodes: Sequence[str], environment: Mapping[str, str] | None = None
) -> Starter | None:
    """Srun of a step that has the job's workers, each on the node of its place; None where mpirun is to start them.

    nodes: names, in order of node rank. environment: the supervisor's; None for showing.

    Raises:
        TargetError: there is no srun on this node.
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
            # Node by node as they are named: nodes may have different numbers of workers, which no other way allows for.
            *(f"--nodes={len(nodes)}", f"--ntasks={len(planned)}", "--distribution=arbitrary"),
            f"--nodelist={','.join(nodes[place.node_rank] for place in planned)}",
            # Workers report their own ends, and some end hours before others.
            *("--wait=0", "--kill-on-bad-exit=0", "--input=none", "--export=ALL", "--immediate=30"),
            "--job-name=paceline-workers",
        ),
        environment={name: text for name, text in (environment or {}).items() if name.startswith(_FOR_SRUN)},
    )
