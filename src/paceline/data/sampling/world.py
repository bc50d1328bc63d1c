"""Which part of the data is this process's: its rank and the world's size, from the caller or the environment.

Standard library alone: the worker's side imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from paceline.errors import DataError, RunContextError

# What says that a process was started as one of several: (variable, who set it). A value of 1 says "alone".
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
    """This process's (rank, world size): as given, else torch.distributed's where the program has initialised it, else RANK
    and WORLD_SIZE, else (0, 1) outside any launcher.

    Raises:
        DataError: only one of the two is given, or rank is not one of 0 .. world_size - 1.
        RunContextError: not given, and RANK or WORLD_SIZE is missing or no number in a worker of a run, under a launcher,
            or beside the other of the two. Never a silent world of one: every worker would take all of the data.
    """
    if (rank is None) != (world_size is None):
        raise DataError(
            f"rank={rank!r} with world_size={world_size!r}: give both, or neither to use RANK and WORLD_SIZE."
        )
    if rank is None or world_size is None:
        return _from_torch() or _from_environment(environment)
    return _checked(rank, world_size)


def _checked(rank: Any, world_size: Any) -> tuple[int, int]:
    """The same two, as integers.

    Raises:
        DataError: no integers, or rank is not one of 0 .. world_size - 1.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise DataError(f"{name}={value!r} is no integer.")
    rank, world_size = rank.__index__(), world_size.__index__()
    if not 0 <= rank < world_size:
        raise DataError(f"rank={rank} with world_size={world_size}: a rank is one of 0 .. world_size - 1.")
    return rank, world_size


def _from_torch() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")  # never imported here: it takes a second
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_environment(environment: Mapping[str, str]) -> tuple[int, int]:
    # An empty variable counts as none.
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
        if value is None or not (value.isascii() and value.isdigit()):
            raise RunContextError(
                f"{name}={value!r} beside RANK={values[0]!r}, WORLD_SIZE={values[1]!r}: a launcher sets both to numbers "
                "for each worker. Pass the environment on as it is, or give rank= and world_size=."
            )
    rank, world_size = int(values[0] or ""), int(values[1] or "")
    if not rank < world_size:
        raise RunContextError(f"RANK={rank} with WORLD_SIZE={world_size}: a rank is one of 0 .. WORLD_SIZE - 1.")
    return rank, world_size


def _launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, with the variable that says so, or None."""
    # A run's worker that is not told how many there are: its environment was changed.
    if environment.get("PACELINE_RUN_DIR") and not environment.get("PACELINE_WORLD_SIZE"):
        return f"Paceline's launcher (PACELINE_RUN_DIR={environment['PACELINE_RUN_DIR']})"
    for name, owner in _SIGNS:
        if (value := environment.get(name)) and value != "1":
            return f"{owner} ({name}={value})"
    return None


def own_positions(
    length: int, rank: int, world_size: int, *, start: int = 0, drop_last: bool = False, pad: bool = False
) -> range:
    """Positions start + rank, start + rank + world_size, ... of an epoch of `length` samples.

    start: the first position that no rank has had yet. Over the ranks, each position from there on comes exactly once:

    # length 8, world_size 3     rank 0: 0 3 6    rank 1: 1 4 7    rank 2: 2 5
    # drop_last                          0 3              1 4              2 5
    # pad                                0 3 6            1 4 7            2 5 8      (8 stands for 0)

    drop_last: leave out what does not come to one for each rank. pad: give each rank as many as rank 0; positions from
    `length` on stand for those from 0 on, so that a few samples come twice.
    """
    left = length - start
    if drop_last:
        end = length - left % world_size
    elif pad:
        # -left % n is what `left` lacks to be a multiple of n.
        end = length + -left % world_size
    else:
        end = length
    return range(start + rank, max(end, start + rank), world_size)


def check_tail(drop_last: object, pad: object) -> None:
    """Refuse to leave the tail out and to fill it up at once.

    Raises:
        DataError: both were asked for.
    """
    if drop_last and pad:
        raise DataError("drop_last=True and pad=True: the tail is either left out or filled up. Give one of them.")


def length_of(source: Any, where: str) -> int:
    """The number of samples: `source` itself, or its length.

    Raises:
        DataError: it is neither a number nor anything with a length.
    """
    try:
        length: int = len(source) if hasattr(source, "__len__") else source.__index__()
    except (AttributeError, TypeError):
        raise DataError(
            f"{where} was given a {type(source).__name__}, which is no number and has no length. Give the data set, "
            "or how many samples it has; data without a length (a stream) has no positions to share out."
        ) from None
    if length < 0:
        raise DataError(f"{where}: length={length}; a number of samples is 0 or more.")
    return length
