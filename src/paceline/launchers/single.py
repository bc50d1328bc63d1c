"""One process, for a job without a distributed backend."""

from __future__ import annotations

from paceline.job.job import Job
from paceline.job.plan import Command, Launch
from paceline.launchers.processes import ProcessesLauncher


class SingleLauncher:
    """Starts the script once; it finds the variables of a world of one."""

    def check(self, job: Job) -> None:
        """Needs nothing."""

    def commands(self, launch: Launch) -> list[Command]:
        return ProcessesLauncher().commands(launch)
