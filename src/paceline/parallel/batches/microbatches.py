"""From a batch to this rank's microbatches, with the weight of each in the whole. Loaded on use: it imports torch."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.batches.batch import Microbatch, Parts, consecutive, own_rows, piece_sizes
from paceline.parallel.batches.rows import Rows, move, unwrap
from paceline.parallel.errors import ParallelError, by_value, named_ranks
from paceline.parallel.exchange import gather
from paceline.parallel.mesh import World
from paceline.parallel.pytree import in_reals, sampled, tensors_in
from paceline.parallel.reduce import sum_number
from paceline.parallel.task import Task

#: So many numbers of each tensor are looked at, spread over all of it.
SAMPLED = 2048


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


def agree_on_batch(batch: Any, world: World) -> None:
    """Compare the batch, or None where there is none, with the other ranks'. One small message; called on all ranks.

    Raises:
        ParallelError: on every rank, with what each has.
    """
    if world.size == 1:
        return
    # A rank whose loader has ended takes part with -1, or the others would wait for it here.
    own = -1 if batch is None else fingerprint(batch)
    # The maximum of the number and of its negative: the largest and the smallest of all ranks in one message.
    both = torch.tensor([own, -own], dtype=torch.int64, device=world.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    largest, smallest = both.tolist()
    if largest == -smallest:
        return
    # Only now, when they differ, is there a second message. All ranks come here, since all know the same two numbers.
    everyone = gather((own, "none any more" if batch is None else _shown(batch)))
    parts = [f"{named_ranks(ranks)}: {text}" for (_, text), ranks in by_value(everyone).items()]
    raise ParallelError(
        f"the ranks are not given the same batch: {'; '.join(parts)}. Every rank has to be given the "
        "same global batches, and as many: seed what is drawn at random (data, too) alike, and don't split by rank."
    )


def tags(place: tuple[int, ...]) -> tuple[int, int]:
    """A number for the place and its square, whose sums over the ranks tell whether all are at the same one."""
    # The tag is small, for the sums of tags and of squares have to be exact in single precision.
    tag = zlib.crc32(repr(place).encode()) % 64
    return tag, tag * tag


def agree_on_place(sums: Tensor, place: tuple[int, int, int], program: int, world: World) -> None:
    """Compare where the replicas are, or the ranks of a single one; no message where they agree.

    sums: of the `tags` of place and program over the replica group, over all ranks where there is none.
    place: epoch, samples seen after this batch, steps before it. program: a number for what the step has computed.

    Raises:
        ParallelError: on every rank, with where each is: one has left out a step, or left a loop.
    """
    # A group of None stands for the whole world, here and below.
    count = dist.get_world_size(world.replica_group)
    # On a GPU this is left out: the host would have to wait for the device.
    if sums.device.type != "cpu" or sums[1].item() * count == sums[0].item() ** 2:
        return
    places = gather((world.rank, *place, program, hash("order")), world.replica_group)
    if len({tuple(found[1:4]) for found in places}) == 1:
        first = places[0][4]
        others = ", ".join(str(found[0]) for found in places if found[4] != first)
        # Python draws the order of a set of texts in each process.
        has_order = len({found[5] for found in places}) > 1
        cause = (
            "Or it goes through a set (`for kind in set(kinds)`), whose order is another one in each process: start all ranks "
            "with PYTHONHASHSEED=0 in the environment."
        )
        raise ParallelError(
            f"rank {places[0][0]} and rank {others} do not compute the same model: what its forward reads (an attribute, a "
            "global, a config's value) was set to another value there. Every rank has to make the same changes."
            f"{f' {cause}' if has_order else ''}"
        )
    shown = "; ".join(
        f"rank {rank} in epoch {epoch} at sample {sample}, step {step}" for rank, epoch, sample, step, *_ in places
    )
    raise ParallelError(
        f"the ranks are not at the same batch: {shown}. Every rank has to make the same calls: does one of them leave out a "
        "step, or leave the loop, by its own clock or data?"
    )


def agree_on_written(sums: Tensor, names: Sequence[str], world: World) -> None:
    """Compare what the replicas' forward passes have written to parameters; no message where they agree.

    sums: of the size of what was written and of its square, over the replica group, which has no other ranks.
    names: of the parameters that this rank's forward has changed.

    Raises:
        ParallelError: on every rank: each replica has written other values.
    """
    count = dist.get_world_size(world.replica_group)
    total, squares = sums.tolist()
    # The variance, as a part of the squared mean: its square root is the distance, and 1e-6 of that is rounding.
    if squares * count - total * total <= 1e-12 * total * total:
        return
    shown = ", ".join(dict.fromkeys(name for of_rank in gather(list(names), world.replica_group) for name in of_rank))
    raise ParallelError(
        f"the model's forward changes {shown} in place by what is in its batch, and each replica has other rows: under "
        f"{world.layout} the copies would differ. Change a parameter after par.step(batch), under torch.no_grad(), or use "
        "PipelineParallel()."
    )


def fingerprint(batch: Any) -> int:
    """A number of 32 bits from the shapes and a sample of the values of all tensors."""
    found = b""
    for tensor in tensors_in(batch):
        flat = in_reals(sampled(tensor, SAMPLED))
        # A sum of doubles: the same numbers in the same order have the same sum on all ranks, to the bit.
        places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        value = float((flat.double().nan_to_num() * places).sum()) if len(flat) else 0.0
        found += struct.pack(f"<{tensor.dim() + 1}qd", tensor.dim(), *tensor.shape, value)
    return zlib.crc32(found)


def _shown(batch: Any) -> str:
    tensors = tensors_in(batch)
    shown = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
    return f"tensors of {shown or 'no shape'} ({fingerprint(batch):08x})"
