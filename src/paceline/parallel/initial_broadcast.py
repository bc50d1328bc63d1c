"""Make the initial model equal on all ranks: compare its structure, then broadcast rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel import tied_parameters
from paceline.parallel.errors import ParallelError, by_value, named_ranks
from paceline.parallel.exchange import gather, journal
from paceline.parallel.mesh import WorldPlace
from paceline.parallel.reduce import broadcast
from paceline.parallel.task import Task


def check(
    task: Task, optimizer: torch.optim.Optimizer | None, place: WorldPlace, settings: Mapping[str, object] | None = None
) -> None:
    """Raise unless all ranks have the same model, loss and optimizer.

    Every rank must call this. `settings` maps names to further values that must be equal on all ranks.

    Raises:
        ParallelError: On every rank, with the first difference and the ranks' values.
    """
    if place.size == 1:
        return
    own = [*description(task, optimizer), *(f"{name}: {value!r}" for name, value in (settings or {}).items())]
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    # Add this rank's own digest: for a rank that replaces a lost rank, `gather` returns the lost rank's digest instead.
    if len({digest, *gather(digest)}) > 1:
        raise ParallelError(f"the ranks don't have the same model: {first_difference(gather(own))}")


def share(model: nn.Module) -> None:
    """Overwrite parameters and buffers with rank 0's values.

    Every rank must call this. A rank that replaces a lost rank gets the present values later.
    """
    if journal.is_read or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    seen: dict[int, Tensor] = {
        id(tensor): tensor for _, tensor in tied_parameters.all_names(model) if not tensor.is_meta
    }
    broadcast(list(seen.values()), dist.group.WORLD)


def description(task: Task, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return one line for each property that must be equal on all ranks."""
    model = task.model
    lines = [f"model: {type(model).__qualname__}"]
    lines += [
        f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}: {list(tensor.shape)} {tensor.dtype}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ' frozen'}{' empty' * tensor.is_meta}"
        for name, tensor in tied_parameters.all_names(model)
    ]
    lines += [f"tie: {' = '.join(group)}" for group in tied_parameters.find(model)]
    lines += [f"module {name}: {type(part).__qualname__}({part.extra_repr()})" for name, part in model.named_modules()]
    lines += [f"training {name or 'model'}: {part.training}" for name, part in model.named_modules()]
    lines += [
        f"loss: {getattr(task.loss, '__qualname__', type(task.loss).__qualname__)}",
        f"microbatches: {task.microbatches}",
        f"precision: {task.precision}",
        f"seed: {task.seed}",
    ]
    if optimizer is not None:
        lines.append(f"optimizer: {type(optimizer).__qualname__}")
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if isinstance(value, (int, float, bool, str, tuple))}
            lines.append(f"optimizer group {number}: {len(group['params'])} parameters, {settings}")
    return lines


def first_difference(everyone: list[list[str]]) -> str:
    """Describe the first line in which the ranks' descriptions differ."""
    lines = next(lines for lines in zip_longest(*everyone, fillvalue="nothing more") if len(set(lines)) > 1)
    # Report a line that some ranks lack, such as the line of an extra parameter: it shifts all later lines, so they differ too.
    sets = [set(own) for own in everyone]
    alone = next((line for line in lines if sum(line in own for own in sets) < len(sets)), lines[0])
    what = alone.partition(": ")[0]
    values = [dict(line.partition(": ")[::2] for line in reversed(own)).get(what, "none") for own in everyone]
    parts = [f"{value} on {named_ranks(ranks)}" for value, ranks in by_value(values).items()]
    return (
        f"{what} is {'; '.join(parts)}. Build it from the same code and configuration on every rank "
        "(parameters' values need not agree: rank 0's are taken)."
    )
