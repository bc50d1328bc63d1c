"""The memory that a worker will need, compared with the free memory.

    parameters      this worker's part, which is already allocated
    gradients       as large as the trained parameters
    optimizer       measured on a small parameter: the size of its state per number
    activations     of one step, if "auto" has measured the model; otherwise unknown before the first step

After an out-of-memory failure the run's report reads this plan (`attempts/<k>/memory_<rank>.json`).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.parallel.auto import available_bytes
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.executor import ParallelHandle
from paceline.parallel.experts import expert_parameters
from paceline.parallel.forecast.measure import state_numbers, tried_state_numbers
from paceline.parallel.forecast.predict import forecast, shown_bytes
from paceline.parallel.mesh import World, WorldPlace
from paceline.parallel.reduce import local
from paceline.parallel.strategy import Layout
from paceline.system.files import write_json
from paceline.system.memory import memory, swap_free


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory that one worker needs and has, in bytes.

    Attributes:
        optimizer: The size of the optimizer's state. None if the trial step failed.
        activations: The size of a step's saved activations. None without a measurement.
        coming: The gradients and optimizer state that are not allocated yet.
        free: The memory that this worker may still allocate.
        limit: The source of `free` in words, such as "the GPU's memory".
        spare: Free swap that the worker may use.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    coming: int
    free: int
    limit: str
    spare: int = 0

    @property
    def needed(self) -> int:
        """The memory that the worker needs in bytes. Unknown parts count as 0."""
        return self.parameters + self.gradients + (self.optimizer or 0) + (self.activations or 0)

    def __str__(self) -> str:
        parts = [f"parameters {shown_bytes(self.parameters)}", f"gradients {shown_bytes(self.gradients)}"]
        if self.optimizer is not None:
            parts.append(f"optimizer {shown_bytes(self.optimizer)}")
        if self.activations is not None:
            parts.append(f"activations about {shown_bytes(self.activations)}")
        return ", ".join(parts)


class PlannedHandle(ParallelHandle, Protocol):
    """A training (`Parallel`) with its memory plan, None before it is computed."""

    memory: MemoryPlan | None


def plan(par: ParallelHandle, memory_bytes: int | None) -> MemoryPlan:
    """Compute this worker's memory plan. `memory_bytes` is the user's limit, or None."""
    params = list(par.executor.named_parameters().values())
    own = sum(local(param).nbytes for param in params)
    trained = sum(local(param).nbytes for param in params if param.requires_grad) if par.optimizer is not None else 0
    numbers = tried_state_numbers(par.optimizer, par.device)
    optimizer = None if numbers is None else numbers * trained
    # If the optimizer's state exists already (after a step, or after loading), count it as allocated memory.
    held = _held(par.optimizer)
    activations = None
    if par.measured is not None:
        own_forecast = forecast(par.measured, par.world.layout, par.task.microbatches, par.task.at_once)
        activations = None if own_forecast.reason else int(own_forecast.activation_bytes + own_forecast.together_bytes)
    coming = trained + max(0, (optimizer or 0) - held)
    free, limit, spare = _room(par.device, own, memory_bytes)
    return MemoryPlan(
        parameters=own,
        gradients=trained,
        optimizer=optimizer,
        activations=activations,
        coming=coming,
        free=free,
        limit=limit,
        spare=spare,
    )


def refuse_too_large(
    model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, place: WorldPlace, memory_bytes: int | None
) -> None:
    """Raise if the parts of the model will not fit in memory.

    Every rank must call this before the model is copied or cut.

    Raises:
        ParallelError: On every rank, if one rank lacks the memory.
    """
    params = list(model.parameters())
    whole = sum(param.nbytes for param in params)
    trained = sum(param.nbytes for param in params if param.requires_grad)
    share = share_of(model, layout)
    numbers = tried_state_numbers(optimizer, place.device)
    gradients, states = int(trained * share), None if numbers is None else int(numbers * trained * share)
    # Subtract the size of the parameters' parts that move to other workers: cutting the model frees this memory.
    coming = gradients + max(0, (states or 0) - _held(optimizer)) - int(whole * (1 - share))
    free, limit, spare = _room(place.device, whole, memory_bytes)
    own = MemoryPlan(
        parameters=int(whole * share),
        gradients=gradients,
        optimizer=states,
        activations=None,
        coming=max(0, coming),
        free=free,
        limit=limit,
        spare=spare,
    )
    _refuse(own, type(model).__name__, layout, place.size)


def check(par: ParallelHandle, memory_bytes: int | None) -> MemoryPlan:
    """Return this worker's memory plan.

    Every rank must call this. Raise an error if any worker's plan does not fit in memory.

    Raises:
        ParallelError: On every rank, if one rank lacks memory for gradients and optimizer.
    """
    own, world = plan(par, memory_bytes), par.world
    rank, worst = _refuse(own, par.skeleton.name, world.layout, world.size)
    coming = worst.coming + (worst.activations or 0)
    if coming > worst.free and world.rank == 0:
        text = _text(worst, rank, par.skeleton.name, world.layout, world.size, "will take about", coming)
        warnings.warn(f"{text} It may run out of memory.", stacklevel=2)
    _report(own, world.rank)
    return own


def _refuse(own: MemoryPlan, name: str, layout: Layout, size: int) -> tuple[int, MemoryPlan]:
    """Raise if any rank's plan does not fit in its memory.

    Every rank must call this. Return (rank with the least memory left, its plan). `name`: The model's class. `size`: World size.
    """
    plans = [MemoryPlan(**one) for one in gather(asdict(own))]
    rank = max(range(len(plans)), key=lambda rank: plans[rank].coming - plans[rank].free - plans[rank].spare)
    worst = plans[rank]
    if worst.coming <= worst.free + worst.spare:
        return rank, worst
    if size > 1 and layout.shard == layout.pipe == layout.tensor == layout.expert == 1:
        states = worst.parameters + worst.gradients + (worst.optimizer or 0)
        do = f"FullyShard() takes about {shown_bytes(states / size)} on each worker for the same."
    else:
        do = "Use more workers that share the model, or a node with more memory."
    raise ParallelError(
        f"{_text(worst, rank, name, layout, size, 'has to take', worst.coming)} The training would end for want of memory. {do} "
        "Fewer workers on a node leave each more; memory_bytes= says what a worker has, if you know better."
    )


def _room(device: torch.device, held: int, memory_bytes: int | None) -> tuple[int, str, int]:
    if memory_bytes is not None:
        return max(0, memory_bytes - held), f"memory_bytes={memory_bytes}", 0
    if device.type == "cuda":
        # Count memory as free that torch's allocator has cached, but does not use.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, available_bytes(device) + kept), "the GPU's memory", 0
    there = memory()
    sharing = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    limit = there.limit if sharing == 1 else f"{there.limit}, shared by {sharing} workers"
    spare = swap_free() // sharing if there.limit.startswith("the machine") else 0
    return max(0, available_bytes(device)), limit, spare


def _text(worst: MemoryPlan, rank: int, name: str, layout: Layout, size: int, verb: str, coming: int) -> str:
    where = f"rank {rank}" if size > 1 else "the worker"
    have = shown_bytes(worst.free) + (f" and {shown_bytes(worst.spare)} of swap" if worst.spare else "")
    return (
        f"{name} as {layout}: {where} {verb} {shown_bytes(coming)} beside its parameters ({worst}), and has {have} free "
        f"({worst.limit})."
    )


def _held(optimizer: torch.optim.Optimizer | None) -> int:
    states: list[Mapping[str, object]] = list(optimizer.state.values()) if optimizer is not None else []
    return sum(local(value).nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _report(own: MemoryPlan, rank: int) -> None:
    with contextlib.suppress(OSError, KeyError):
        run_dir, attempt = os.environ["PACELINE_RUN_DIR"], os.environ["PACELINE_ATTEMPT"]
        write_json(Path(run_dir, "attempts", attempt, f"memory_{rank}.json"), asdict(own))


def share_of(model: nn.Module, layout: Layout) -> float:
    """Return the fraction of the parameters' bytes on each worker."""
    parts = layout.shard * layout.pipe * layout.tensor
    if layout.expert == 1:
        return 1 / parts
    whole = sum(param.nbytes for param in model.parameters())
    experts = sum(param.nbytes for param in expert_parameters(model)) / max(whole, 1)
    return (1 - experts * (1 - 1 / layout.expert)) / parts


def refuse_no_room(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World, memory_bytes: int | None
) -> None:
    """Raise if the parts of a model without values will not fit in memory.

    Every rank must call this.

    Raises:
        ParallelError: On every rank, before an allocation fails or the kernel kills a process.
    """
    params = list(model.parameters())
    whole = sum(param.nbytes for param in params)
    trained = sum(param.nbytes for param in params if param.requires_grad)
    layout = world.layout
    needed = (whole + trained * (1 + state_numbers(optimizer, world.device))) * share_of(model, layout)
    least = int(min(gather(int(memory_bytes or available_bytes(world.device)))))
    if needed <= least:
        return
    raise ParallelError(
        f"{type(model).__name__} needs {shown_bytes(needed)} for parameters, gradients and optimizer on each worker as {layout}, "
        f"and a worker has {shown_bytes(least)}. Give more workers, or a layout that cuts them into more parts, such as "
        "FullyShard()."
    )
