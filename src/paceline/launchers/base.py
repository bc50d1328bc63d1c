"""The one thing a launcher does, and how one is found by name."""

from __future__ import annotations

from typing import Protocol, cast

from paceline.errors import LauncherError
from paceline.job.job import Job
from paceline.job.plan import Command, Launch
from paceline.system import plugins


class Launcher(Protocol):
    """Turns a launch into command lines. Pure but for looking at what is installed; starts nothing."""

    def check(self, job: Job) -> None:
        """Refuse, before anything starts, what can't be launched from this machine.

        Raises:
            LauncherError: what is missing, and how to get it.
        """

    def commands(self, launch: Launch) -> list[Command]:
        """The command lines that start every worker of the launch once."""


_GROUP = "paceline.launchers"
_OWN = {
    "processes": "paceline.launchers.processes:ProcessesLauncher",
    "mpi": "paceline.launchers.mpi:MpiLauncher",
}


def get_launcher(name: str) -> Launcher:
    """The launcher of this name.

    Raises:
        LauncherError: there is none; the message lists those there are.
    """
    launcher = plugins.load(_GROUP, _OWN, name)
    if launcher is None:
        raise LauncherError(f"no launcher {name!r}; there are {', '.join(launcher_names())}.")
    return cast(Launcher, launcher)


def launcher_names() -> list[str]:
    """The names of all launchers, Paceline's own and installed ones."""
    return plugins.names(_GROUP, _OWN)
