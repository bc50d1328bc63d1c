"""Partition data over ranks: files balanced by bytes, items round-robin.

Standard library only: both the supervisor and the worker import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from heapq import heapify, heapreplace
from typing import Any, overload

from paceline.data.sampling.world import own_rank
from paceline.errors import DataError


def split_by_size(sizes: Sequence[tuple[str, int]], parts: int) -> list[list[str]]:
    """Split file names into `parts` sorted lists balanced by bytes.

    Files are assigned from the largest to the smallest, each to the part with the fewest bytes so far. On a tie, the
    part with the fewest files gets the file (longest processing time first: Graham, 1969). Two parts differ by at most
    the size of the largest file. With more parts than files, some parts are empty.

    Args:
        sizes: (name, bytes) of each file, in any order. The result does not depend on the order.
        parts: Number of parts.

    Raises:
        DataError: parts < 1, a negative size, or a duplicate name.
    """
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise DataError(f"parts={parts!r}: files are split into one part or more. Give the number of nodes or ranks.")
    placed: list[list[str]] = [[] for _ in range(parts)]
    seen: set[str] = set()
    # The load (bytes, files, part) of each part. The part with the smallest load gets the next file, even an empty file.
    loads = [(0, 0, part) for part in range(parts)]
    heapify(loads)
    # Break ties by name: each node computes the parts independently and must get the same parts.
    for name, size in sorted(sizes, key=lambda pair: (-pair[1], pair[0])):
        if size < 0:
            raise DataError(f"the file {name!r} has a size of {size} bytes; its store must tell a size of 0 or more.")
        if name in seen:
            raise DataError(f"the file {name!r} comes twice; each name may come once, or its place would be ambiguous.")
        seen.add(name)
        load, files, part = loads[0]
        placed[part].append(name)
        heapreplace(loads, (load + size, files + 1, part))
    return [sorted(part) for part in placed]


def partition(items: Any, rank: int | None = None, world_size: int | None = None) -> Any:
    """Return this rank's part of the items, distributed round-robin over the ranks.

    Every item belongs to exactly one rank, and part lengths differ by at most one. If `items` is a range, a numpy array, a
    torch tensor, a pandas frame or a pyarrow table, the result has the same type. Otherwise it is a read-only view.

    Args:
        items: An object with a length and integer indices, in the same order on every rank.
        rank: This rank; give it together with world_size. Default: `torch.distributed` if initialised, else RANK and
            WORLD_SIZE; rank 0 of 1 without a run or launcher.
        world_size: Number of ranks.

    Raises:
        DataError: The items have no order (a set) or no length (a generator), or the rank is not in 0 .. world_size - 1.
        RunContextError: RANK or WORLD_SIZE is missing in a worker of a run or under a launcher.
    """
    rank, world_size = own_rank(rank, world_size)
    _check_items(items)
    turn = slice(rank, None, world_size)
    if hasattr(items, "iloc"):  # pandas or a lookalike: its [] selects columns or labels, so use `iloc`
        return items.iloc[turn]
    if hasattr(items, "itercolumns"):  # a table or record batch of pyarrow: its [] selects columns
        import pyarrow

        return items.take(pyarrow.array(range(rank, len(items), world_size), pyarrow.int64()))
    # A slice of a numpy array (which has `strides`) or of a torch tensor (`stride()`) is a view, so it costs no copy.
    if isinstance(items, range) or hasattr(items, "strides") or hasattr(items, "stride"):
        return items[turn]
    return Turns(items, range(rank, len(items), world_size))


class Turns(Sequence[Any]):
    """A read-only view of items at the indices of a range."""

    def __init__(self, items: Any, numbers: range) -> None:
        self._items = items
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Turns: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Turns(self._items, self._numbers[index])
        return self._items[self._numbers[index]]

    def __repr__(self) -> str:
        return f"<{len(self)} of {len(self._items)} items of a {type(self._items).__name__}: {self._numbers!r}>"


def _check_items(items: Any) -> None:
    kind = type(items).__name__
    if isinstance(items, (Set, Mapping)):
        raise DataError(
            f"items is a {kind}, whose order may differ from rank to rank, so that items would be lost or come twice. "
            "Give a list, such as sorted(items)."
        )
    if isinstance(items, (str, bytes)):
        raise DataError(f"items={items[:60]!r} is one {kind}, not a sequence of items. Give a list.")
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise DataError(f"items is a {kind}, which has no length or no numbers. Give a list, such as list(items).")
