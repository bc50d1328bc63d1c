"""Take rows out of a batch, join rows, and gather them from other replicas.

The batches of all replicas have the same containers (lists, dicts, objects). So replicas send each other only values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.batches.batch import Parts, Whole
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.pytree import flatten, map_leaves, map_tensors, shown, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)


_T = TypeVar("_T")


class Rows(Generic[_T]):
    """A batch from which rows can be taken.

    Attributes:
        count: The number of rows: the first dimension of the first tensor, which all other tensors must share.

    Raises:
        ParallelError: Tensors of the batch differ in their numbers of rows, or no tensor has rows.
    """

    def __init__(self, batch: _T) -> None:
        self._leaves, self._structure = flatten(batch, _is_taken_whole)
        self.count = self._counted()

    def take(self, start: int, stop: int) -> _T:
        """Return the batch with only the rows from `start` to `stop`.

        This cuts tensors, and lists with one value per row. Other values stay whole.
        """
        return self._of_rows(lambda leaf: leaf[start:stop])

    def pick(self, rows: list[int]) -> _T:
        """Return a copy of the batch with only the rows at these indices."""
        return self._of_rows(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else [leaf[row] for row in rows])

    def _of_rows(self, chosen: Callable[[Any], object]) -> _T:
        def of_rows(leaf: object) -> object:
            match leaf:
                # A tensor without dimensions has no rows and belongs to the whole batch.
                case Tensor() if leaf.dim():
                    return chosen(leaf)
                case list():
                    return chosen(leaf) if len(leaf) == self.count else list(leaf)
            return leaf

        taken: _T = self._structure.rebuild(map(of_rows, self._leaves))
        return taken

    def _counted(self) -> int:
        leaves = zip(self._structure.paths(), self._leaves, strict=True)
        tensors = [(shown(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors:
            raise ParallelError("no tensor in the batch has a first dimension to cut along; give split=.")
        first, rows = tensors[0][0], tensors[0][1].shape[0]
        for name, tensor in tensors:
            if tensor.shape[0] != rows:
                raise ParallelError(
                    f"{first} of the batch has {rows} rows, but {name} has shape {list(tensor.shape)}. Tensors are cut along "
                    "their first dimension; wrap values that belong to all rows in paceline.parallel.Whole(...) (see split=)."
                )
        if rows == 0:
            raise ParallelError("the batch has no rows.")
        return rows


def join_rows(pieces: Sequence[_T]) -> _T:
    """Join pieces of a batch by rows. Values without rows come from the first piece."""
    opened = [flatten(piece, _is_taken_whole) for piece in pieces]
    counts = [next((len(tensor) for tensor in tensors_in(piece) if tensor.dim()), None) for piece in pieces]

    def joined(leaves: tuple[Any, ...]) -> object:
        first = leaves[0]
        if isinstance(first, Tensor) and first.dim():
            return torch.cat(leaves)
        # Join only lists with one value per row. Another list, such as column names, belongs to the whole batch.
        if isinstance(first, list) and all(
            count in (None, len(own)) for count, own in zip(counts, leaves, strict=True)
        ):
            return [item for own in leaves for item in own]
        return first

    together: _T = opened[0][1].rebuild(map(joined, zip(*(leaves for leaves, _ in opened), strict=True)))
    return together


def can_join(pieces: Sequence[object]) -> bool:
    """Return whether pieces of a batch differ only in their numbers of rows.

    Other dimensions differ if replicas have padded their rows to different lengths.
    """
    shapes = [[tensor.shape[1:] for tensor in tensors_in(piece) if tensor.dim()] for piece in pieces]
    return all(own == shapes[0] for own in shapes)


def move(value: _T, device: torch.device) -> _T:
    """Copy all tensors in nested containers to `device`, also those in `Whole`."""
    # A copy to the CPU must block, because its values are read immediately.
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def unwrap(value: _T) -> _T:
    """Replace each `Whole` in nested containers by its value."""
    return map_leaves(value, lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf, _is_whole)


def is_plain_list(value: object) -> bool:
    """Return whether the value is a list without tensors and containers."""
    return isinstance(value, list) and not any(
        isinstance(item, (Tensor, Mapping, tuple, list, Whole)) or (is_dataclass(item) and tensors_in(item))
        for item in value
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, Whole)


def _is_taken_whole(value: object) -> bool:
    return _is_whole(value) or is_plain_list(value)


def gather_parts(own: Sequence[Parts | None], like: Parts, group: dist.ProcessGroup | None) -> list[list[Parts | None]]:
    """Return all replicas' pieces on the CPU, as [replica][piece].

    Every rank of the group must call this. A piece is one replica's part of one microbatch. `own` has this replica's pieces,
    and `like` is any piece of this rank. Replicas send tensors, numbers and strings. Other objects are copied from `like`.

    Raises:
        NotPlainError: On every rank: a list in the batch has an object for each row, and these objects cannot be sent.
    """
    # A replica without rows takes part too, because each rank of the group must join each collective.
    everyone = gather([None if piece is None else sendable(piece) for piece in own], group)
    return [[None if piece is None else filled(like, piece) for piece in of_replica] for of_replica in everyone]


def most_rows(own: Parts, like: Parts, group: dist.ProcessGroup | None) -> Parts:
    """Return the batch piece of the replica with the most rows.

    Every rank of the group must call this. Use this if rows of different lengths cannot be joined. `own` is this
    replica's piece. Objects that cannot be sent are copied from `like`, any piece of this rank.
    """
    pieces = [piece for pieces in gather_parts([own], like, group) for piece in pieces if piece is not None]
    return max(pieces, key=lambda piece: Rows(piece).count)


def sendable(piece: Parts) -> list[list[object]]:
    """Return each value of a batch's piece as [value], or [] if it cannot be sent."""
    # Treat a list with one plain value per row as one leaf, because the list's length may differ between replicas.
    return [[leaf] if isinstance(leaf, (list, *_PLAIN)) else [] for leaf in flatten(piece, is_plain_list)[0]]


def filled(like: Parts, sent: list[list[object]]) -> Parts:
    """Rebuild another rank's piece of a batch from its `sendable` values; others come from `like`."""
    leaves, structure = flatten(like, is_plain_list)
    parts: Parts = structure.rebuild([*own, leaf][0] for own, leaf in zip(sent, leaves, strict=True))
    return parts
