"""The parts that ranks get: files balanced by bytes, items by turns.

Standard library alone: the supervisor and the worker both import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from heapq import heapify, heapreplace
from typing import Any, overload

from paceline.data.sampling.world import own_rank
from paceline.errors import DataError


def split_by_size(sizes: Sequence[tuple[str, int]], parts: int) -> list[list[str]]:
    """`parts` lists of names, every name in exactly one, each list sorted.

    sizes: (name, bytes) of each file, in any order: the same files always give the same parts. Names differ.
    The heaviest and the lightest part differ by no more than the largest file; with more parts than files some are empty.

    The largest file still to go is put where the fewest bytes are; where those are equal, where the fewest files are,
    then to the lowest part. That is longest-processing-time-first (Graham, 1969).

    Raises:
        DataError: parts < 1, a size below 0, or a name that comes twice.
    """
    if not _is_integer(parts) or parts < 1:
        raise DataError(f"parts={parts!r}: files are split into one part or more. Give the number of nodes or ranks.")
    placed: list[list[str]] = [[] for _ in range(parts)]
    seen: set[str] = set()
    # (bytes, files, part): the smallest is where the next file goes. Counting files too spreads the empty ones.
    loads = [(0, 0, part) for part in range(parts)]
    heapify(loads)
    # By name where sizes are equal: each node computes this for itself, and all have to come to the same parts.
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
    """The items of this rank: numbers rank, rank + world_size, rank + 2 world_size, ... of `items`, as a view.

    Over the ranks every item comes exactly once, and the parts' lengths differ by at most one. Items in turn rather than in
    blocks: the rule by which `DistributedSampler` deals too, and sorted items give each rank some of every kind.

    items: what has a length and can be indexed by number, in the same order on every rank. A range gives a range, a numpy
        array or torch tensor a view of itself, a pandas frame its rows, any other sequence (a list, a torch data set) a read-only
        sequence that holds no copy.
    rank, world_size: both or neither. Without them, from RANK and WORLD_SIZE; a world of one outside any run and launcher.

    Raises:
        DataError: items in no order (a set) or of no length (a generator); a rank that is not one of 0 .. world_size - 1.
        RunContextError: not given, and RANK or WORLD_SIZE is missing in a worker of a run or under a launcher.
    """
    rank, world_size = own_rank(rank, world_size)
    _check_items(items)
    turn = slice(rank, None, world_size)
    if hasattr(items, "iloc"):  # pandas, or what looks like it: [] means columns or labels there
        return items.iloc[turn]
    # What has strides gives a view when it is sliced: numpy arrays have `strides`, torch's tensors `stride()`.
    if isinstance(items, range) or hasattr(items, "strides") or hasattr(items, "stride"):
        return items[turn]
    return Turns(items, range(rank, len(items), world_size))


class Turns(Sequence[Any]):
    """Some of a sequence's items, by number, without copying any."""

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
    """Refuse what ranks might not see as the same items under the same numbers.

    Raises:
        DataError: they have no order, no length or no numbers.
    """
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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
