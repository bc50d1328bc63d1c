"""The rows that other replicas have of a batch. Loaded on use: it imports torch.

Each replica's piece has the structure of this rank's, whatever classes that is made of. So only what stands in it is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.parallel.batches.batch import Parts, Whole, rebuild
from paceline.parallel.exchange import gather

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)


def gather_parts(own: Sequence[Parts | None], like: Parts, group: Any) -> list[list[Parts | None]]:
    """[replica] -> its pieces, on the CPU; None where it has none. Called on all ranks of the group.

    like: any piece of this rank's; an object that is neither a tensor, a number nor a text is taken from it.

    Raises:
        NotPlainError: on every rank: a list of the batch holds one object for each row that is none of these.
    """
    told = gather([None if piece is None else list(_leaves(piece)) for piece in own], group)
    return [[None if leaves is None else _filled(like, leaves) for leaves in of_replica] for of_replica in told]


def _leaves(value: Any) -> Iterator[list[Any]]:
    """What stands in the containers: [it], or [] for what other ranks can't be told."""
    found: list[list[Any]] = []
    _walked(value, lambda leaf: found.append([leaf] if isinstance(leaf, (list, *_PLAIN)) else []))
    return iter(found)


def _filled(like: Parts, leaves: list[list[Any]]) -> Parts:
    left = iter(leaves)

    def put(leaf: Any) -> Any:
        found = next(left)
        return found[0] if found else leaf

    parts: Parts = _walked(like, put)
    return parts


def _walked(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list) and not any(map(_is_container, value)):
        # Rows of plain values, of which each replica has other numbers.
        return change(value)
    if not _is_container(value) or isinstance(value, Tensor):
        return change(value)
    return rebuild(value, lambda item: _walked(item, change))


def _is_container(value: Any) -> bool:
    if isinstance(value, (Tensor, Mapping, tuple, list, Whole)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
