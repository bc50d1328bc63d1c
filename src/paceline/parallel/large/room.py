"""Is there room for a worker's part of a model, before any of it is made? Loaded on use: it imports torch."""

from __future__ import annotations

import torch
from torch import nn

from paceline.parallel.auto import available_bytes
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.experts.found import expert_parameters
from paceline.parallel.forecast.measure import state_numbers
from paceline.parallel.forecast.predict import shown_bytes
from paceline.parallel.mesh import World
from paceline.parallel.strategy import Layout


def share_of(model: nn.Module, layout: Layout) -> float:
    """The part of the parameters' bytes that each worker keeps, if all keep as much."""
    parts = layout.shard * layout.pipe * layout.tensor
    if layout.expert == 1:
        return 1 / parts
    whole = sum(param.nbytes for param in model.parameters())
    experts = sum(param.nbytes for param in expert_parameters(model)) / max(whole, 1)
    return (1 - experts * (1 - 1 / layout.expert)) / parts


def refuse_too_large(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World, memory_bytes: int | None
) -> None:
    """Nothing where an equal part of parameters, gradients and optimizer fits each worker. Called on all ranks.

    Raises:
        ParallelError: on every rank; else torch would fail to take memory, or the kernel end the process, on its way.
    """
    params = list(model.parameters())
    whole = sum(param.nbytes for param in params)
    trained = sum(param.nbytes for param in params if param.requires_grad)
    layout = world.layout
    needed = (whole + trained * (1 + state_numbers(optimizer, world.device))) * share_of(model, layout)
    free = memory_bytes or available_bytes(world.device)
    least = int(min(gather(int(free))))
    if needed <= least:
        return
    raise ParallelError(
        f"{type(model).__name__} needs {shown_bytes(needed)} for parameters, gradients and optimizer on each worker as {layout}, "
        f"and a worker has {shown_bytes(least)}. Give more workers, or a layout that cuts them into more parts, such as "
        "FullyShard()."
    )
