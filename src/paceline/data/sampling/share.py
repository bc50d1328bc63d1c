"""Which positions of the global order are one rank's."""

from __future__ import annotations

from typing import Any

from paceline.errors import DataError


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
