"""The run that this process is a worker of, read from its environment in this one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunContextError


@dataclass(frozen=True)
class WorkerContext:
    """This process's run, its rank there and the attempt it belongs to."""

    run_dir: Path
    rank: int
    world_size: int
    attempt: int

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
        for name in ("RANK", "WORLD_SIZE", "PACELINE_ATTEMPT"):
            value = environment.get(name, "")
            # int() takes " 1" and "-1" as well, which no launcher writes.
            if not value.isdigit():
                raise RunContextError(
                    f"{name}={value!r} in a process of run {environment.get('PACELINE_RUN_ID')}: Paceline's launcher sets "
                    f"{name} to a number for each worker. Something between the launcher and this process removed or "
                    "changed it; pass the environment on as it is."
                )
            numbers.append(int(value))
        return cls(Path(run_dir), *numbers)
