"""The run that this process is a worker of, read from its environment in this one place; or from its parents' environments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunContextError
from paceline.system import processes
from paceline.system.run_variables import nested_rank

#: Who tells a process its rank: Paceline, Open MPI's mpirun, srun. From the last two a worker sets PACELINE_RANK itself, which
#: its parents' environments don't show.
_RANKS = ("PACELINE_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SUPERVISOR = ["-m", "paceline.supervisor"]


@dataclass(frozen=True)
class WorkerContext:
    """This process's run, its rank there and the attempt it belongs to.

    rank, world_size: of a rank that the script has started itself (`paceline.system.run_variables`), those that it has there.
    """

    run_dir: Path
    rank: int
    world_size: int
    attempt: int

    @classmethod
    def of_process(cls) -> WorkerContext | None:
        """The context of this process, also where whoever started it has cleared its environment; None outside a run.

        An empty PACELINE_RUN_DIR says that it is outside.

        Raises:
            RunContextError: inside a run, but it can't be told for which rank.
        """
        if "PACELINE_RUN_DIR" in os.environ:
            return cls.from_environment()
        found = _of_parents()
        context = cls.from_environment(found)
        # All but the folder, which without a rank is an error: what this process starts looks at its parents in its turn.
        for name, value in found.items():
            if name.startswith(("PACELINE_", "AZUREML_")) and name != "PACELINE_RUN_DIR":
                os.environ.setdefault(name, value)
        return context

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerContext | None:
        """The context of a worker, or None outside a run.

        Raises:
            RunContextError: inside a run, but a variable that its launcher sets is missing or no number. There is no
                silent world of one: two workers that both take themselves for rank 0 would spoil the run.
        """
        run_dir = environment.get("PACELINE_RUN_DIR")
        if not run_dir:
            return None
        numbers = []
        for name in ("PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_ATTEMPT"):
            value = environment.get(name, "")
            # int() takes " 1" and "-1" as well, which no launcher writes.
            if not value.isdigit():
                raise RunContextError(
                    f"{name}={value!r} in a process of run {environment.get('PACELINE_RUN_ID')}: Paceline's launcher sets "
                    f"{name} to a number for each worker. Something between the launcher and this process removed or "
                    "changed it; pass the environment on as it is."
                )
            numbers.append(int(value))
        rank, world_size = nested_rank(environment) or numbers[:2]
        return cls(Path(run_dir), rank, world_size, numbers[2])


def _of_parents() -> dict[str, str]:
    """The environment of the nearest process above this one that is of a run; empty where none is, or none can be seen.

    A process that has left its parents on purpose (a daemon's double fork) hangs below the run's supervisor on this machine;
    below other processes, in a container of its own, or on a system without /proc nothing tells of the run.

    Raises:
        RunContextError: its parents have ended, and only the run's supervisor is left.
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
            break  # of a service or a sweep, which is no part of the run that it was started from
        raise RunContextError(
            f"this process was started inside run {run_id}, with an environment that says nothing of it, and the worker that it "
            "comes from has ended: what it logs would be lost. Pass the worker's environment on as it is. PACELINE_RUN_DIR= "
            "(empty) says that it shall log to no run."
        )
    return {}
