"""Turn a job and its nodes into the command lines of the workers."""

from paceline.launchers.base import Launcher, get_launcher, launcher_names

__all__ = ["Launcher", "get_launcher", "launcher_names"]
