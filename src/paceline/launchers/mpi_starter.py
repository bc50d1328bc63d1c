"""Open MPI where the target has a starter of its own (Slurm's srun): one command line for all workers.

Every worker gets all places on its command line and takes what is its own, by the rank that the starter gave it
(`paceline.worker.srun`): a program that takes one command line for all can't give each another.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import LauncherError
from paceline.job.plan import Command, Launch, Starter
from paceline.launchers import environment
from paceline.launchers.mpi_hosts import GIVEN, check_same_mpi, networks_of, set_words, values_of_place
from paceline.runs.folder import RunFolder

#: The starter's own variables: what the user sets under these prefixes is for the workers, and must not become its options.
_STARTERS = ("SLURM_", "SRUN_")
#: By these Open MPI 4 knows that it was started by srun; without them each worker is a world of its own.
_KEPT_FOR_4 = ("SLURM_NODELIST", "SLURM_STEP_ID", "SLURM_JOBID")


def starter_command(launch: Launch, starter: Starter, major: int, variables: Mapping[str, str]) -> Command:
    """The command that starts all workers. major: the version of Open MPI; variables: its own.

    Raises:
        LauncherError: nodes that differ, or a job whose workers are to run in containers.
    """
    check_same_mpi(launch)
    if launch.prepared[0].container:
        raise LauncherError(
            f"distributed_backend='mpi' in custom_docker_image={launch.job.environment.docker_image!r} can't be started by "
            f"{starter.name}. Let the compute target start it with mpirun (mpi='mpirun'), or choose another backend."
        )
    users = launch.job.environment_variables
    for_workers = {name: value for name, value in users.items() if name.startswith(_STARTERS)}
    defaults = environment.defaults(launch, launch.places[0])
    if networks := networks_of(launch):
        defaults["OMPI_MCA_btl_tcp_if_include"] = networks
    keep = [word for name in _KEPT_FOR_4 if major < 5 for word in ("--keep", name)]
    options = ["--srun", *keep, *set_words(for_workers), *_place_words(launch)]
    return Command(
        argv=(*starter.argv, *environment.worker_argv(launch, 0, *options)),
        environment={
            **environment.of_run(launch),
            **variables,
            **{name: value for name, value in users.items() if name not in for_workers},
            # Last: what the starter needs itself stands over what the workers are given, which take theirs from the command
            # line.
            **starter.environment,
        },
        defaults=defaults,
        node_rank=0,
        ranks=tuple(place.rank for place in launch.places),
        is_launcher=True,
        log=RunFolder(launch.run_dir).driver_log,
    )


def _place_words(launch: Launch) -> list[str]:
    """`--for 0-1 --on NODE --set ...` for each node, and behind it what its workers do not have in common."""
    words: list[str] = []
    for node in launch.nodes:
        places = [place for place in launch.places if place.node_rank == node.node_rank]
        values = [values_of_place(launch, place, GIVEN) for place in places]
        common = {name: value for name, value in values[0].items() if all(other.get(name) == value for other in values)}
        words += ["--for", f"{places[0].rank}-{places[-1].rank}", "--on", node.name, *set_words(common)]
        for place, own in zip(places, values, strict=True):
            if rest := {name: value for name, value in own.items() if name not in common}:
                words += ["--for", f"{place.rank}-{place.rank}", *set_words(rest)]
    return words
