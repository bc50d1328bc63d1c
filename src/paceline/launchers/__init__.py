"""Launchers: each is given a job and its nodes, and returns the command lines that start the workers."""

from paceline.launchers.base import Launcher, get_launcher, launcher_names

__all__ = ["Launcher", "get_launcher", "launcher_names"]
