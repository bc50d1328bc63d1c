"""From a batch to this rank's microbatches, with the weight of each in the whole. Loaded on use: it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.parallel.batches.agree import agree_on_batch
from paceline.parallel.batches.batch import Microbatch, Parts, consecutive, own_rows, piece_sizes
from paceline.parallel.batches.rows import Rows, move, unwrap
from paceline.parallel.errors import ParallelError
from paceline.parallel.mesh import World
from paceline.parallel.reduce import sum_number
from paceline.parallel.task import Task


class _ForStep:
    """A batch on its way from `epoch` to `step`; a loop can't look into it."""

    data: Any

    def __iter__(self) -> Any:
        raise self._refusal()

    def __getitem__(self, key: Any) -> Any:
        raise self._refusal()

    def _refusal(self) -> ParallelError:
        return ParallelError(
            "what par.epoch() gives can't be taken apart: give it to par.step(batch) as it is. This worker's rows of it are "
            "batch.data."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnBatch(_ForStep):
    """This replica's rows of one global batch, as `Parallel.epoch` gives them.

    data: the batch as the loader's collate_fn made it, of this replica's rows alone, microbatch after microbatch; one
        row that doesn't count where the replica has none.
    rows: how many of them count. global_rows: those of all replicas.
    epoch, consumed: the position after this batch: the samples of the epoch that all replicas have then seen.
    """

    data: Any
    rows: int
    global_rows: int
    epoch: int
    consumed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch(_ForStep):
    """A whole global batch with its position, as `Parallel.epoch` gives them where the loader is a plain iterable."""

    data: Any
    epoch: int
    consumed: int


def cut(batch: Any, task: Task, world: World) -> list[Microbatch]:
    """This replica's microbatches of a global batch, which is the same on every rank, or of an OwnBatch.

    Called on all ranks: with a loss_weight the weights are summed over the replicas.

    Raises:
        ParallelError: the batch can't be cut, or nothing in it counts.
    """
    own = batch if isinstance(batch, OwnBatch) else None
    # A batch from `epoch` was loaded by Paceline itself, and is known to be the same, or this rank's part of the same.
    if not isinstance(batch, _ForStep):
        agree_on_batch(batch, world)
    parts = Rows(split(batch, task))
    global_rows = parts.count if own is None else own.global_rows
    sizes = piece_sizes(global_rows, task.microbatches, world.replicas)
    if own is None:
        ranges = own_rows(global_rows, task.microbatches, world.replicas, world.replica)
    else:
        ranges = consecutive(of_micro[world.replica] for of_micro in sizes)
        asked = ranges[-1].stop
        # A replica without rows has loaded one, as padding.
        if parts.count != max(asked, 1):
            raise ParallelError(
                f"this rank's part of the batch has {parts.count} rows, but {asked} samples were asked of the loader. "
                "A collate_fn that joins or splits samples can't be spread; give batches as a plain iterable."
            )
    # Padding is the first row, whose weight is 0.
    pieces = [parts.take(span.start, span.stop) if span else parts.take(0, 1) for span in ranges]
    weights, total = [float(len(span)) for span in ranges], float(global_rows)
    if task.loss_weight is not None:
        weights = [
            weigh(task.loss_weight, unwrap(piece.target), len(span)) for piece, span in zip(pieces, ranges, strict=True)
        ]
        # The weights of all replicas together: a mean of the replicas' means would count a row of a short replica for
        # more.
        total = sum_number(sum(weights), world.replica_group, world.device)
        if not total > 0:
            raise ParallelError(
                f"the weights that loss_weight gives for this batch sum to {total:g} over all replicas; they have to be "
                "numbers above 0. Leave out batches in which nothing counts."
            )
    micros = []
    for index, (piece, span, weight) in enumerate(zip(pieces, ranges, weights, strict=True)):
        args, kwargs, target = unwrap(move(piece, world.device))
        micros.append(
            Microbatch(
                args=args,
                kwargs=kwargs,
                target=target,
                rows=len(span),
                # In float64, for the weights of many microbatches are to add up to 1.
                weight=torch.tensor(weight / total, dtype=torch.float64, device="cpu"),
                index=index,
                global_rows=sum(sizes[index]),
            )
        )
    return micros


def cut_parts(parts: Parts, task: Task, world: World) -> list[Microbatch]:
    """This replica's microbatches of a global batch that is split already, and is the same on every rank."""
    return cut(GlobalBatch(data=parts, epoch=0, consumed=0), replace(task, split=lambda parts: parts), world)


def first_rows(batch: Any, task: Task, world: World, rows: int) -> Microbatch:
    """At most so many rows of a batch, the first of this rank's, as if they were all."""
    parts = Rows(split(batch, task))
    count = min(rows, parts.count)
    return sole(parts, count, world.device, count)


def sole(parts: Rows, count: int, device: torch.device, global_rows: int) -> Microbatch:
    """The first rows, so many, as a microbatch that is all of a batch, or a replica's part of it."""
    args, kwargs, target = unwrap(move(parts.take(0, count), device))
    return Microbatch(args, kwargs, target, count, torch.tensor(1.0, dtype=torch.float64, device="cpu"), 0, global_rows)


def split(batch: Any, task: Task) -> Parts:
    """The parts of a batch, or of one from `epoch`.

    Raises:
        ParallelError: `split` returned something else.
    """
    parts: Any = task.split(batch.data if isinstance(batch, _ForStep) else batch)
    if not isinstance(parts, tuple) or len(parts) != 3 or not isinstance(parts[1], Mapping):
        what = type(parts).__name__
        if isinstance(parts, tuple):
            what += f" of {', '.join(type(part).__name__ for part in parts)}"
        raise ParallelError(
            f"split(batch) returned {what}; it has to return Parts(args, kwargs, target): a tuple, a dict and what "
            "the loss is given."
        )
    return Parts(tuple(parts[0]), dict(parts[1]), parts[2])


def weigh(weight: Callable[[Any], Any] | None, target: Any, rows: int) -> float:
    """The weight of so many rows with this target, checked; their number where there is no function for it.

    Raises:
        ParallelError: it is no number of at least 0.
    """
    if rows == 0 or weight is None:
        return float(rows)
    found = weight(target)
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ParallelError(
            f"the weight of a target (loss_weight=, or weight= of evaluate) is {shown}; it has to be one number, such as "
            "(target != -100).sum()."
        ) from error
    # A comparison with NaN is false, so this refuses it as well.
    if not 0 <= value < float("inf"):
        raise ParallelError(
            f"the weight of a target (loss_weight=, or weight= of evaluate) is {value:g}; it has to be a number of at least 0."
        )
    return value
