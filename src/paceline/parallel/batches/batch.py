"""A global batch, and how its rows are divided into microbatches and over replicas.

    rows of the global batch     0 1 2 3 4 5 6 7 8 9        microbatches=2, 2 replicas
    microbatch                   0 0 0 0 0 1 1 1 1 1
    replica                      0 0 0 1 1 0 0 1 1 1

The batch is cut into microbatches first, and then each microbatch over the replicas. So a microbatch has the same rows with any
number of replicas, and operations over its rows, such as batch normalisation, give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from paceline.parallel.errors import ParallelError

TARGETS = ("labels", "label", "target", "targets", "y")

#: Functions of the script: (output, target) -> loss, (output, target) -> metrics, target -> weight. `Any`: the script's types.
LossFunction = Callable[[Any, Any], Tensor]
MetricFunction = Callable[[Any, Any], object]
WeightFunction = Callable[[Any], Any]


class Parts(NamedTuple):
    """A batch as the model's arguments and the loss's target."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    target: object


#: A function of the script that splits a batch into its parts.
SplitFunction = Callable[[Any], Parts]


class Microbatch(NamedTuple):
    """One microbatch of one replica.

    Attributes:
        rows: The number of rows. 0 marks padding: a replica without rows computes one row of weight 0, so that all ranks do
            the same steps.
        weight: This microbatch's share of the global batch, 0-dim, float64, on the CPU. 0 for padding.
        index: The number of the microbatch, from 0.
        global_rows: The number of rows in this microbatch over all replicas.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    target: object
    rows: int
    weight: Tensor
    index: int  # type: ignore[assignment]  # a tuple's own `index` is not missed
    global_rows: int


def with_rows(micros: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """Return the microbatches that have rows on at least one replica.

    All ranks skip the other microbatches, which add nothing to the loss. If all are empty, return the first one.
    """
    return [micro for micro in micros if micro.global_rows] or micros[:1]


@dataclass(frozen=True)
class Whole:
    """A wrapper for a value of a batch that is not split into rows."""

    value: object


def default_split(batch: object) -> Parts:
    """Split (x, ..., y), or a dict with a usual target key, into `Parts`."""
    if isinstance(batch, Mapping):
        targets = [name for name in TARGETS if name in batch]
        if len(targets) != 1:
            raise ParallelError(
                f"the batch is a dict with the keys {', '.join(map(repr, batch))}, of which "
                f"{' and '.join(map(repr, targets)) or 'none'} may be the target (one of "
                f"{', '.join(TARGETS)}). Say which it is: split=lambda batch: Parts((batch['x'],), {{}}, batch['y'])."
            )
        return Parts((), {name: value for name, value in batch.items() if name != targets[0]}, batch[targets[0]])
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return Parts(tuple(batch[:-1]), {}, batch[-1])
    raise ParallelError(
        f"a batch is {_kind(batch)}; expected (x, y), (x1, x2, y) or a dict with a target. For anything else give "
        "split=, a function from a batch to paceline.parallel.Parts(args, kwargs, target)."
    )


def piece_sizes(rows: int, microbatches: int, replicas: int) -> list[list[int]]:
    """Return how many rows of each microbatch each replica computes, as [microbatch][replica].

    The totals of any two microbatches differ by at most one row, and so do the totals of any two replicas.
    """
    sizes, turn = [], 0
    for index in range(microbatches):
        # Distribute the remaining rows: each of the first microbatches gets one more row.
        own = rows // microbatches + (index < rows % microbatches)
        extra = own % replicas
        # The replica with an extra row changes with the microbatch. Otherwise replica 0 would always have the most work.
        sizes.append([own // replicas + ((replica - turn) % replicas < extra) for replica in range(replicas)])
        turn = (turn + extra) % replicas
    return sizes


def own_rows(rows: int, microbatches: int, replicas: int, replica: int) -> list[range]:
    """Return a replica's row numbers in the global batch: one range per microbatch."""
    sizes = piece_sizes(rows, microbatches, replicas)
    return consecutive(size for of_micro in sizes for size in of_micro)[replica::replicas]


def consecutive(sizes: Iterable[int]) -> list[range]:
    """Return consecutive ranges that have these sizes, the first from 0."""
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {list(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
