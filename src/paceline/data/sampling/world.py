"""Rank, world size and sample positions of this process.

Standard library only: workers import it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from paceline.errors import DataError, RunContextError

# (variable, launcher): each of these launchers starts several processes and sets this variable. The value 1 means one process.
_SIGNS = (
    ("PACELINE_WORLD_SIZE", "Paceline's launcher"),
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("PMI_SIZE", "an MPI launcher"),
    ("HOROVOD_SIZE", "horovodrun"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun"),
)


def own_rank(
    rank: int | None = None, world_size: int | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """Return (rank, world size) from the arguments, torch.distributed or the environment.

    The arguments take precedence, then `torch.distributed` if initialised, then RANK and WORLD_SIZE. Without a run or a
    launcher, return (0, 1).

    Raises:
        DataError: Only one of the two is given, or the rank is not in 0 .. world_size - 1.
        RunContextError: In a worker of a run or of a launcher, RANK or WORLD_SIZE is missing or not a number. Without
            this error, every worker would use all of the data.
    """
    if (rank is None) != (world_size is None):
        raise DataError(f"rank={rank!r} with world_size={world_size!r}: give both, or neither for the variables.")
    if rank is None or world_size is None:
        return _from_torch() or _from_environment(environment)
    return _checked(rank, world_size)


def _checked(rank: Any, world_size: Any) -> tuple[int, int]:
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise DataError(f"{name}={value!r} must be an integer.")
    rank, world_size = rank.__index__(), world_size.__index__()
    if not 0 <= rank < world_size:
        raise DataError(f"rank={rank} with world_size={world_size}: a rank is one of 0 .. world_size - 1.")
    return rank, world_size


def _from_torch() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")  # do not import torch here, which takes a second
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_environment(environment: Mapping[str, str]) -> tuple[int, int]:
    # Treat an empty variable as unset.
    values = [environment.get(name) or None for name in ("RANK", "WORLD_SIZE")]
    if values == [None, None]:
        owner = _launcher(environment)
        if owner is None:
            return 0, 1
        raise RunContextError(
            f"RANK and WORLD_SIZE are not set, but {owner} started this process. Taking all of the data on every worker "
            "would spoil the training: give rank= and world_size=, or set both variables for each worker."
        )
    for name, value in zip(("RANK", "WORLD_SIZE"), values, strict=True):
        if value is None or not (value.isascii() and value.isdecimal()):
            raise RunContextError(
                f"{name}={value!r} beside RANK={values[0]!r}, WORLD_SIZE={values[1]!r}: a launcher sets both to numbers "
                "for each worker. Pass the environment on unchanged, or give rank= and world_size=."
            )
    rank, world_size = int(values[0] or ""), int(values[1] or "")
    if not rank < world_size:
        raise RunContextError(f"RANK={rank} with WORLD_SIZE={world_size}: a rank is one of 0 .. WORLD_SIZE - 1.")
    return rank, world_size


def _launcher(environment: Mapping[str, str]) -> str | None:
    """Return the name of the launcher that started this process, or None."""
    # Paceline's launcher sets PACELINE_WORLD_SIZE in each worker of a run. If it is missing, the script has removed it.
    if environment.get("PACELINE_RUN_DIR") and not environment.get("PACELINE_WORLD_SIZE"):
        return f"Paceline's launcher (PACELINE_RUN_DIR={environment['PACELINE_RUN_DIR']})"
    signs = ((owner, name, environment.get(name, "")) for name, owner in _SIGNS)
    return next((f"{owner} ({name}={value})" for owner, name, value in signs if value not in ("", "1")), None)


def own_positions(
    length: int, rank: int, world_size: int, *, start: int = 0, drop_last: bool = False, pad: bool = False
) -> range:
    """Return the positions of the global order that one rank gets.

        length 8, world_size 3     rank 0: 0 3 6    rank 1: 1 4 7    rank 2: 2 5
        drop_last                          0 3              1 4              2 5
        pad                                0 3 6            1 4 7            2 5 8      (8 stands for 0)

    Every position from `start` on belongs to exactly one rank, except the last few with `drop_last`. With `pad`, positions
    from `length` on wrap around to 0, so a few samples come twice.
    """
    left = length - start
    if drop_last:
        end = length - left % world_size
    elif pad:
        # `-left % world_size` is the number of samples to add, so that all ranks get equally many.
        end = length + -left % world_size
    else:
        end = length
    return range(start + rank, max(end, start + rank), world_size)


def check_tail(drop_last: object, pad: object) -> None:
    """Raise DataError if both drop_last and pad are set."""
    if drop_last and pad:
        raise DataError("drop_last=True and pad=True: the tail is either left out or filled up. Give one of them.")


def length_of(source: Any, where: str) -> int:
    """Return `source` if it is a number of samples, else its length.

    Raises:
        DataError: The source is negative, or is not a number and has no length. The message begins with `where`.
    """
    try:
        length: int = len(source) if hasattr(source, "__len__") else source.__index__()
    except (AttributeError, TypeError):
        raise DataError(
            f"{where} was given a {type(source).__name__}, which is not a number and has no length. Give the data set, "
            "or how many samples it has; data without a length (a stream) can't be divided by positions."
        ) from None
    if length < 0:
        raise DataError(f"{where}: length={length}; a number of samples is 0 or more.")
    return length
