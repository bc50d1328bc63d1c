"""A check that all ranks are given the same global batch, which nothing else would notice. Loaded on use: it imports torch.

With different ones, a pipeline computes the loss of one batch's outputs and another one's targets; and where one rank's
loader ends before the others', they would wait for it for ever.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.errors import ParallelError, by_value, named_ranks
from paceline.parallel.exchange import gather
from paceline.parallel.mesh import World
from paceline.parallel.pytree import in_reals, sampled, tensors_in

#: So many numbers of each tensor are looked at, spread over all of it.
SAMPLED = 2048


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
