"""What a target does, and how one is found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from paceline import plugins
from paceline.errors import TargetError
from paceline.job import Job
from paceline.plan import Command, Node

#: Told in words what a run waits for, such as "2 runs ahead"; answers whether to give up waiting.
Waiting: TypeAlias = "Callable[[str], bool]"


@dataclass(frozen=True, kw_only=True)
class Granted:
    """Nodes that a run holds until it is released. ports: free on the first node."""

    nodes: tuple[Node, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A command that runs. pid: on its node."""

    command: Command
    pid: int


class Target(Protocol):
    """Gives nodes, and starts command lines on them. One object serves one run."""

    def check(self, job: Job) -> None:
        """Refuse, before anything starts, a job that this target can never hold.

        Raises:
            TargetError: what is asked for and what there is.
        """

    def preview(self, job: Job) -> Granted:
        """Nodes as the job would get them, for showing; nothing is held, and ports are made up."""

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Take the run's place in the queue. Called by the submitting program, so that order is order of submission."""

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Granted | None:
        """Block until the run holds its nodes; None once `waiting` has said to give up."""

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        """Start the run's supervisor, detached, and hand it the open lock; its pid."""

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> Started:
        """Start a command on its node. shell: the environment under what the command sets."""

    def signal(self, pid: int, node_rank: int, number: int) -> bool:
        """Send a signal to a process on a node; False where it is gone."""

    def release(self, run_dir: Path) -> None:
        """Give the nodes back, or the place in the queue. Harmless when there is nothing to give."""


_GROUP = "paceline.targets"
_OWN = {"local": "paceline.targets.local:LocalTarget"}


def get_target(name: str) -> Target:
    """The compute target of this name.

    Raises:
        TargetError: there is none; the message lists those there are.
    """
    target = plugins.load(_GROUP, _OWN, name)
    if target is None:
        raise TargetError(f"no compute target {name!r}; there are {', '.join(target_names())}. None picks 'local'.")
    return cast(Target, target)


def target_names() -> list[str]:
    """The names of all compute targets, Paceline's own and installed ones."""
    return plugins.names(_GROUP, _OWN)
