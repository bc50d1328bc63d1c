"""Start each worker as a plain process: for single workers, gloo, nccl and TensorFlow's servers.

Paceline does not import torch, and needs no agent such as torchrun's: workers need only the variables that
`init_process_group` reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.job.job import Job
from paceline.job.plan import Command, Launch, RankSlot
from paceline.launchers import environment
from paceline.runs.folder import RunFolder


class ProcessesLauncher:
    """A launcher that starts each worker as a separate process."""

    def check(self, job: Job) -> None:
        """Accept every job: this launcher needs no other program."""

    def commands(self, launch: Launch) -> list[Command]:
        of_run = environment.of_run(launch)
        return [worker_command(launch, place, of_run) for place in launch.places]


def worker_command(launch: Launch, place: RankSlot, of_run: Mapping[str, str] | None = None) -> Command:
    """Return the command line of one worker. `of_run` are the variables of all workers."""
    return Command(
        argv=environment.worker_argv(launch, place.node_rank),
        environment=dict(of_run or environment.of_run(launch))
        | environment.of_place(launch, place)
        | environment.of_rank(launch, place)
        | dict(launch.job.environment_variables),
        defaults=environment.defaults(launch, place),
        node_rank=place.node_rank,
        ranks=(place.rank,),
        log=RunFolder(launch.run_dir).rank_log(launch.attempt, place.rank),
        spare=launch.spare.replace("%", str(place.node_rank)),
    )
