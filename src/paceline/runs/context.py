"""Find the run of which this process is a worker, by its own or a parent's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunContextError
from paceline.system import processes
from paceline.system.run_variables import TRACKED_VARIABLE, launched_rank, nested_rank

#: Variables with a worker's rank: Paceline's, Open MPI's and Slurm's. Paceline reads them from the parent processes' /proc files.
_RANKS = ("PACELINE_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SUPERVISOR = ["-m", "paceline.supervisor"]


@dataclass(frozen=True)
class WorkerContext:
    """The run, rank and attempt of a worker process.

    A worker may start further processes with ranks of their own, as Lightning does (`paceline.system.run_variables`).
    In such a process, `rank` and `world_size` describe the process, not the worker.
    """

    run_dir: Path
    rank: int
    world_size: int
    attempt: int

    @classmethod
    def of_process(cls) -> WorkerContext | None:
        """Return this process's context, or None outside a run.

        If the environment variable PACELINE_RUN_DIR is empty, the process is outside a run. A child process of a
        program that called `paceline.init` belongs to that program's run.

        Raises:
            RunContextError: The process is inside a run, but its rank is unknown.
        """
        if "PACELINE_RUN_DIR" in os.environ:
            return cls.from_environment()
        if tracked := os.environ.get(TRACKED_VARIABLE):
            return cls(Path(tracked), *launched_rank(), attempt=1)
        found = _of_parents()
        context = cls.from_environment(found)
        # Don't set PACELINE_RUN_DIR: a child process with it and without a rank would fail. A child finds the run by its parents.
        for name, value in found.items():
            if name.startswith(("PACELINE_", "AZUREML_")) and name != "PACELINE_RUN_DIR":
                os.environ.setdefault(name, value)
        return context

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerContext | None:
        """Return the context of a worker, or None outside a run.

        Raises:
            RunContextError: A variable of the launcher is missing or not a number. Without this error, several workers
                could act as rank 0 and spoil the run.
        """
        run_dir = environment.get("PACELINE_RUN_DIR")
        if not run_dir:
            return None
        numbers = []
        for name in ("PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_ATTEMPT"):
            value = environment.get(name, "")
            # Check the digits, since int() also accepts " 1" and "-1", which no launcher sets.
            if not value.isdecimal():
                raise RunContextError(
                    f"{name}={value!r} in a process of run {environment.get('PACELINE_RUN_ID')}: Paceline's launcher sets "
                    f"{name} to a number for each worker. Something between the launcher and this process removed or "
                    "changed it; pass the environment on unchanged."
                )
            numbers.append(int(value))
        rank, world_size = nested_rank(environment) or numbers[:2]
        return cls(Path(run_dir), rank, world_size, numbers[2])


def _of_parents() -> dict[str, str]:
    """Return the environment of the nearest ancestor in a run, or an empty dict.

    The result is empty if no ancestor is in a run, /proc is missing, or the worker runs in another container.

    Raises:
        RunContextError: The worker that started this process has ended, as after a double fork. The nearest ancestor is
            then the run's supervisor, whose environment names no worker.
    """
    for pid in processes.ancestors():
        environment = processes.environment_of(pid)
        if environment.get("PACELINE_RUN_DIR"):
            rank = next((environment[name] for name in _RANKS if name in environment), "")
            return environment | {"PACELINE_RANK": rank}
        if (run_id := environment.get(processes.SUPERVISOR_VARIABLE)) is None:
            continue
        command = processes.command_of(pid)
        if _SUPERVISOR not in (command[number : number + 2] for number in range(len(command))):
            break  # the supervisor of a service or sweep is no part of the run that started it
        raise RunContextError(
            f"this process was started inside run {run_id}, with an environment without the run's variables, and the worker that "
            "it comes from has ended: its metrics would be lost. Pass the worker's environment on unchanged. PACELINE_RUN_DIR= "
            "(empty) makes it log to no run."
        )
    return {}
