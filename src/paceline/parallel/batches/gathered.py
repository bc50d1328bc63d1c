"""The rows that other replicas have of a batch. Loaded on use: it imports torch.

Each replica's piece has the structure of this rank's, whatever classes that is made of. So only what stands in it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.parallel.batches.batch import Parts
from paceline.parallel.batches.rows import Rows, is_plain_list
from paceline.parallel.exchange import gather
from paceline.parallel.pytree import flatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)


def gather_parts(own: Sequence[Parts | None], like: Parts, group: Any) -> list[list[Parts | None]]:
    """[replica] -> its pieces, on the CPU; None where it has none. Called on all ranks of the group.

    like: any piece of this rank's; an object that is neither a tensor, a number nor a text is taken from it.

    Raises:
        NotPlainError: on every rank: a list of the batch holds one object for each row that is none of these.
    """
    # A replica without rows takes part too: each rank of the group has to call each collective.
    everyone = gather([None if piece is None else told(piece) for piece in own], group)
    return [[None if found is None else filled(like, found) for found in of_replica] for of_replica in everyone]


def most_rows(own: Parts, like: Parts, group: Any) -> Parts:
    """The piece of the replica that has most rows, on every rank. Called on all ranks of the group.

    Rows that each replica pads to its own longest can't be put together: no rank knows what they were padded with.
    """
    pieces = [piece for pieces in gather_parts([own], like, group) for piece in pieces if piece is not None]
    return max(pieces, key=lambda piece: Rows(piece).count)


def told(piece: Parts) -> list[list[Any]]:
    """The leaves: [it], or [] for one that other ranks can't be told."""
    # Of a list of plain values, one for each row, each replica has another length: it is one leaf.
    return [[leaf] if isinstance(leaf, (list, *_PLAIN)) else [] for leaf in flatten(piece, is_plain_list)[0]]


def filled(like: Parts, found: list[list[Any]]) -> Parts:
    """The piece of which another rank has `told`, in containers like these."""
    leaves, structure = flatten(like, is_plain_list)
    parts: Parts = structure.rebuild(one[0] if one else leaf for one, leaf in zip(found, leaves, strict=True))
    return parts
