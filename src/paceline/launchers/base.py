"""The interface of a launcher, and the launchers by name."""

from __future__ import annotations

from typing import Protocol, cast

from paceline.errors import LauncherError
from paceline.job.job import Job
from paceline.job.plan import Command, Launch
from paceline.system import plugins


class Launcher(Protocol):
    """An object that returns the command lines for a run's workers."""

    def check(self, job: Job) -> None:
        """Refuse a job that this machine can't launch.

        Raises:
            LauncherError: A program or package is missing; the message says how to install it.
        """

    def commands(self, launch: Launch) -> list[Command]:
        """Return the command lines that together start every worker of the attempt."""


_GROUP = "paceline.launchers"
_OWN = {"processes": "paceline.launchers.processes:ProcessesLauncher", "mpi": "paceline.launchers.mpi:MpiLauncher"}


def get_launcher(name: str) -> Launcher:
    """Return a launcher by name.

    Raises:
        LauncherError: There is no such launcher; the message lists the launchers that exist.
    """
    launcher = plugins.load(_GROUP, _OWN, name)
    if launcher is None:
        raise LauncherError(f"no launcher {name!r}; there are {', '.join(launcher_names())}.")
    return cast(Launcher, launcher)


def launcher_names() -> list[str]:
    """Return the names of all launchers, built-in and installed."""
    return plugins.names(_GROUP, _OWN)
