"""Cut this rank's batch into weighted microbatches, and check that all ranks have the same batch.

Without the check (`agree_on_batch`) different batches would go unnoticed: a pipeline would compute the loss of one batch's
outputs and another batch's targets. If one rank's loader ended early, the other ranks would wait forever.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.batches.batch import Microbatch, Parts, WeightFunction, consecutive, own_rows, piece_sizes
from paceline.parallel.batches.rows import Rows, can_join, gather_parts, join_rows, move, unwrap
from paceline.parallel.errors import ParallelError, by_value, named_ranks
from paceline.parallel.exchange import gather
from paceline.parallel.mesh import World
from paceline.parallel.pytree import described, in_reals, sampled, tensors_in
from paceline.parallel.reduce import sum_number
from paceline.parallel.task import Task

#: How many numbers of each tensor, at even distances, enter the fingerprints of batches, which the ranks compare.
SAMPLED = 2048
#: Ranks compare graphs and positions by digests modulo this number. So the sum of all squared digests stays exact in float64.
TAGS = 2**20


class _ForStep:
    """A batch for `Parallel.step`, which scripts cannot index or iterate over."""

    data: object

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ParallelError(
            "what par.epoch() gives can't be taken apart: give it to par.step(batch) as it is. This worker's rows of it are "
            "batch.data."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnBatch(_ForStep):
    """The rows of this replica in one global batch.

    Attributes:
        data: The result of the loader's collate_fn for this replica's rows, in the order of microbatches. A replica without
            rows has one row as padding.
        rows: The number of this replica's rows, without padding.
        global_rows: The number of rows of all replicas.
        epoch: The batch's epoch.
        consumed: The number of samples of the epoch that all replicas have consumed after this batch.
    """

    data: object
    rows: int
    global_rows: int
    epoch: int
    consumed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch(_ForStep):
    """A whole global batch from a loader that every rank reads."""

    data: object
    epoch: int
    consumed: int


def cut(batch: object, task: Task, world: World) -> list[Microbatch]:
    """Return this replica's microbatches of a global batch, or of an OwnBatch.

    A global batch is the same on every rank, an OwnBatch is the rank's own. Every rank must call this function, because
    the values of the user's function `loss_weight` are summed over the replicas.

    Raises:
        ParallelError: The batch cannot be cut, or the sum of its weights is 0.
    """
    # A batch from `epoch` is the same on all ranks, so only check batches that the script itself passes.
    if not isinstance(batch, _ForStep):
        agree_on_batch(batch, world)
    parts = Rows(split(batch, task))
    global_rows = batch.global_rows if isinstance(batch, OwnBatch) else parts.count
    sizes = piece_sizes(global_rows, task.microbatches, world.replicas)
    if isinstance(batch, OwnBatch):
        ranges = consecutive(of_micro[world.replica] for of_micro in sizes)
        samples = ranges[-1].stop
        # Allow one row for a replica without rows, which has loaded the row as padding.
        if parts.count != max(samples, 1):
            raise ParallelError(
                f"this rank's part of the batch has {parts.count} rows, but the loader was given {samples} samples. Paceline "
                "cannot spread a collate_fn that joins or splits samples; give batches as a plain iterable."
            )
    else:
        ranges = own_rows(global_rows, task.microbatches, world.replicas, world.replica)
    # Fill an empty microbatch with the first row, as padding with a weight of 0.
    pieces = [parts.take(*(span.start, span.stop) if span else (0, 1)) for span in ranges]
    weights, total = [float(len(span)) for span in ranges], float(global_rows)
    if task.loss_weight is not None:
        weights = [
            weigh(task.loss_weight, unwrap(piece.target), len(span)) for piece, span in zip(pieces, ranges, strict=True)
        ]
        # Sum the weights over all replicas: in a mean of the replicas' means, rows of a short replica would weigh more.
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
                # Store the weight in float64, because the weights of many microbatches must add up to 1.
                weight=torch.tensor(weight / total, dtype=torch.float64, device="cpu"),
                index=index,
                global_rows=sum(sizes[index]),
            )
        )
    return micros


def cut_parts(parts: Parts, task: Task, world: World) -> list[Microbatch]:
    """Return this replica's microbatches of a global batch given as `Parts`."""
    return cut(GlobalBatch(data=parts, epoch=0, consumed=0), replace(task, split=lambda parts: parts), world)


def global_parts(batch: object, task: Task, world: World) -> list[Parts]:
    """Return all rows of the global batch in order, on every rank.

    The list has one `Parts`, or one for each replica if the replicas have padded their rows to different lengths.
    """
    if not isinstance(batch, OwnBatch):
        return [split(batch, task)]
    own, group = move(split(batch, task), torch.device("cpu")), world.replica_group
    if group is None:
        return [own]
    everyone = [Rows(piece) for pieces in gather_parts([own], own, group) for piece in pieces if piece is not None]
    # For each microbatch: the range of its rows in each replica's part of the batch.
    sizes = zip(*piece_sizes(batch.global_rows, task.microbatches, world.replicas), strict=True)
    spans = list(map(consecutive, sizes))
    pieces = [
        rows.take(span.start, span.stop)
        for of_micro in zip(*spans, strict=True)
        for rows, span in zip(everyone, of_micro, strict=True)
        if span
    ]
    if can_join(pieces):
        return [join_rows(pieces)]
    counts = [of_replica[-1].stop for of_replica in spans]
    return [rows.take(0, count) for rows, count in zip(everyone, counts, strict=True) if count]


def first_rows(batch: object, task: Task, world: World, rows: int) -> Microbatch:
    """Return up to `rows` of this rank's rows as a single microbatch."""
    parts = Rows(split(batch, task))
    count = min(rows, parts.count)
    return sole(parts, count, world.device, count)


def sole(parts: Rows[Parts], count: int, device: torch.device, global_rows: int) -> Microbatch:
    """Return the first `count` rows as a step's only microbatch."""
    args, kwargs, target = unwrap(move(parts.take(0, count), device))
    return Microbatch(args, kwargs, target, count, torch.tensor(1.0, dtype=torch.float64, device="cpu"), 0, global_rows)


def split(batch: object, task: Task) -> Parts:
    """Call the user's `split` function on a batch. Raise ParallelError unless it returns `Parts`."""
    parts: Any = task.split(batch.data if isinstance(batch, _ForStep) else batch)
    match parts:
        case (args, Mapping() as kwargs, target) if isinstance(parts, tuple):
            return Parts(tuple(args), dict(kwargs), target)
        case tuple():
            names = f" of {', '.join(type(part).__name__ for part in parts)}"
        case _:
            names = ""
    raise ParallelError(
        f"split(batch) returned {type(parts).__name__}{names}; it has to return Parts(args, kwargs, target): a tuple, a dict "
        "and what the loss is given."
    )


def weigh(weight: WeightFunction | None, target: object, rows: int) -> float:
    """Return weight(target), or the number of rows if `weight` is None.

    Raises:
        ParallelError: The weight is not a number of at least 0.
    """
    if rows == 0 or weight is None:
        return float(rows)
    own = weight(target)
    try:
        value = float(own)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParallelError(
            f"the weight of a target (loss_weight=, or weight= of evaluate) is {described(own)}; it has to be one number, "
            "such as (target != -100).sum()."
        ) from error
    # A comparison with nan is False, so this condition refuses nan too.
    if not 0 <= value < float("inf"):
        raise ParallelError(
            f"the weight of a target (loss_weight=, or weight= of evaluate) is {value:g}; it has to be a number of at least 0."
        )
    return value


def agree_on_batch(batch: object, world: World) -> None:
    """Raise unless all ranks have the same batch.

    Every rank must call this. A rank whose loader has ended passes None.

    Raises:
        ParallelError: On every rank, with a description of each rank's batch.
    """
    if world.size == 1:
        return
    # A rank whose loader has ended takes part with -1. Otherwise the other ranks would wait for this rank here.
    own = -1 if batch is None else fingerprint(batch)
    # The maxima of a number and of its negative give the ranks' largest and smallest number in one message.
    both = torch.tensor([own, -own], dtype=torch.int64, device=world.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    largest, smallest = both.tolist()
    if largest == -smallest:
        return
    # Send a second message only if the fingerprints differ. Every rank knows both extremes, so every rank sends it.
    everyone = gather((own, "none any more" if batch is None else _shown(batch)))
    parts = [f"{named_ranks(ranks)}: {text}" for (_, text), ranks in by_value(everyone).items()]
    raise ParallelError(
        f"the ranks are not given the same batch: {'; '.join(parts)}. Every rank must get the same global "
        "batches, and equally many: use the same seeds on all ranks (for data too), and don't split by rank."
    )


def tags(place: tuple[int, ...]) -> tuple[int, int]:
    """Return the hash of a training position, and the hash's square.

    `agree_on_place` gets the sums of both over the ranks. They show whether all ranks have the same hash.
    """
    tag = zlib.crc32(repr(place).encode()) % TAGS
    return tag, tag * tag


def agree_on_place(sums: Tensor, place: tuple[int, int, int], program: int, world: World) -> None:
    """Raise unless all replicas are at the same step and batch.

    The check sends no message if the positions agree. It is skipped on a GPU, because reading the sums would stall the GPU.

    Args:
        sums: The sums over the replicas of the two numbers that `tags` returns.
        place: This rank's position: the epoch, the samples consumed after this batch, the steps before it.
        program: A hash of the operations that this rank has computed.
        world: This rank, with the process groups of its layout.

    Raises:
        ParallelError: On every rank, with each rank's position: a rank has skipped a step, or left a loop.
    """
    # The group is None if it includes all ranks.
    count = dist.get_world_size(world.replica_group)
    # Skip the comparison on a GPU, because the host would have to wait for its result.
    if sums.device.type != "cpu" or int(sums[1]) * count == int(sums[0]) ** 2:
        return
    places = gather((world.rank, *place, program, hash("order")), world.replica_group)
    if len({tuple(of_rank[1:4]) for of_rank in places}) == 1:
        first = places[0][4]
        others = ", ".join(str(of_rank[0]) for of_rank in places if of_rank[4] != first)
        # The hash of a text differs between processes if PYTHONHASHSEED differs. Then sets have different orders, too.
        has_order = len({of_rank[5] for of_rank in places}) > 1
        cause = (
            " Or it goes through a set (`for kind in set(kinds)`), whose order is another one in each process: start all ranks "
            "with PYTHONHASHSEED=0 in the environment."
        )
        raise ParallelError(
            f"rank {places[0][0]} and rank {others} do not compute the same model: a value that its forward reads (an attribute, "
            "a global, a config's value) was set to another value there. Every rank has to make the same changes."
            f"{cause * has_order}"
        )
    shown = "; ".join(
        f"rank {rank} in epoch {epoch} at sample {sample}, step {step}" for rank, epoch, sample, step, *_ in places
    )
    raise ParallelError(
        f"the ranks are not at the same batch: {shown}. Every rank must make the same calls: does a rank skip a "
        "step, or leave the loop, depending on its own clock or data?"
    )


def agree_on_written(sums: Tensor, names: Sequence[str], world: World) -> None:
    """Raise if the replicas' forward passes wrote different values to parameters.

    The check sends no message if the values agree.

    Args:
        sums: The sums over the replicas of m and of m squared, where m is the total magnitude of a replica's written values.
        names: The parameters that this rank's forward pass has changed.
        world: This rank, with the process groups of its layout.

    Raises:
        ParallelError: On every rank: the replicas have written different values.
    """
    count = dist.get_world_size(world.replica_group)
    total, squares = sums.tolist()
    # Compare the variance with the squared mean: relative differences up to 1e-6 (squared: 1e-12) may be rounding.
    if squares * count - total * total <= 1e-12 * total * total:
        return
    shown = ", ".join(dict.fromkeys(name for of_rank in gather(list(names), world.replica_group) for name in of_rank))
    raise ParallelError(
        f"the model's forward changes {shown} in place by values of its batch. The replicas have different rows, "
        f"so under {world.layout} the copies would diverge. Change the parameter after par.step(batch), under "
        "torch.no_grad(), or use PipelineParallel()."
    )


def fingerprint(batch: object) -> int:
    """Hash shapes and sampled values of the batch's tensors to 32 bits."""
    digest = 0
    for tensor in tensors_in(batch):
        flat = in_reals(sampled(tensor, SAMPLED))
        # Sum in float64: the same numbers in the same order then have exactly the same sum on all ranks.
        places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        value = float((flat.double().nan_to_num() * places).sum())
        digest = zlib.crc32(struct.pack(f"<{tensor.dim() + 1}qd", tensor.dim(), *tensor.shape, value), digest)
    return digest


def _shown(batch: object) -> str:
    shown = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(batch)[:4])
    return f"tensors of {shown or 'no shape'} ({fingerprint(batch):08x})"
