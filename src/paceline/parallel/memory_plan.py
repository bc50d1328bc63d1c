"""The memory that a worker's part of a training takes, compared with what there is before the first step. Imports torch.

    parameters      this worker's part: it is there already
    gradients       as large as what is trained
    optimizer       tried on a small parameter: what it keeps for each number
    activations     of a step, only where "auto" has measured the model: else nobody knows before the first step

A run's failure report reads what is written of it (`attempts/<k>/memory_<rank>.json`), where a worker runs out of memory.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.parallel.auto import available_bytes
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.forecast.measure import tried_state_numbers
from paceline.parallel.forecast.predict import forecast, shown_bytes
from paceline.parallel.reduce import local
from paceline.system.memory import memory, swap_free

if TYPE_CHECKING:
    from paceline.parallel.handle import ParallelHandle


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one worker. optimizer: None where it could not be tried. activations: None where nothing was measured.

    coming: of the first three, what is still to be taken. free: what may be taken. limit: what sets that, in words. spare: swap.
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
        """What is known to be needed in all."""
        return self.parameters + self.gradients + (self.optimizer or 0) + (self.activations or 0)

    def __str__(self) -> str:
        parts = [f"parameters {shown_bytes(self.parameters)}", f"gradients {shown_bytes(self.gradients)}"]
        if self.optimizer is not None:
            parts.append(f"optimizer {shown_bytes(self.optimizer)}")
        if self.activations is not None:
            parts.append(f"activations about {shown_bytes(self.activations)}")
        return ", ".join(parts)


def plan(par: ParallelHandle, memory_bytes: int | None) -> MemoryPlan:
    """What this worker takes, and has. memory_bytes: what a worker has, if the caller says so."""
    params = list(par.executor.named_parameters().values())
    own = sum(local(param).nbytes for param in params)
    trained = sum(local(param).nbytes for param in params if param.requires_grad) if par.optimizer is not None else 0
    numbers = tried_state_numbers(par.optimizer, par.device)
    optimizer = None if numbers is None else numbers * trained
    # One that has trained before, or was loaded, has its state already.
    held = _held(par.optimizer)
    activations = None
    if par.measured is not None:
        found = forecast(par.measured, par.world.layout, par.task.microbatches, par.task.at_once)
        activations = None if found.reason else int(found.activation_bytes + found.together_bytes)
    coming = trained + max(0, (optimizer or 0) - held)
    if memory_bytes is not None:
        free, limit, spare = memory_bytes - own, f"memory_bytes={memory_bytes}", 0
    elif par.device.type == "cuda":
        # What torch's allocator keeps and nobody uses is free too.
        kept = torch.cuda.memory_reserved(par.device) - torch.cuda.memory_allocated(par.device)
        free, limit, spare = available_bytes(par.device) + kept, "the GPU's memory", 0
    else:
        there = memory()
        sharing = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        limit = there.limit if sharing == 1 else f"{there.limit}, shared by {sharing} workers"
        free, spare = (
            available_bytes(par.device),
            swap_free() // sharing if there.limit.startswith("the machine") else 0,
        )
    return MemoryPlan(
        parameters=own,
        gradients=trained,
        optimizer=optimizer,
        activations=activations,
        coming=coming,
        free=max(0, free),
        limit=limit,
        spare=spare,
    )


def check(par: ParallelHandle, memory_bytes: int | None) -> MemoryPlan:
    """This worker's plan, if there is room on every worker. Called on all ranks.

    Raises:
        ParallelError: on every rank, where one has no room for gradients and optimizer: the kernel would end its first step.
    """
    own = plan(par, memory_bytes)
    everyone = [asdict(own)] if par.world.size == 1 else gather(asdict(own))
    plans = [MemoryPlan(**one) for one in everyone]
    rank = max(range(len(plans)), key=lambda rank: plans[rank].coming - plans[rank].free - plans[rank].spare)
    worst = plans[rank]
    if worst.coming > worst.free + worst.spare:
        raise ParallelError(
            _text(par, worst, rank, "has to take", worst.coming, "The training would end for want of memory.")
        )
    coming = worst.coming + (worst.activations or 0)
    if coming > worst.free and par.world.rank == 0:
        warnings.warn(_text(par, worst, rank, "will take about", coming, "It may run out of memory."), stacklevel=2)
    _tell(own, par.world.rank)
    return own


def _text(par: ParallelHandle, worst: MemoryPlan, rank: int, verb: str, coming: int, end: str) -> str:
    layout, size = par.world.layout, par.world.size
    where = f"rank {rank}" if size > 1 else "the worker"
    have = shown_bytes(worst.free) + (f" and {shown_bytes(worst.spare)} of swap" if worst.spare else "")
    if size > 1 and layout.shard == layout.pipe == layout.tensor == 1:
        states = worst.parameters + worst.gradients + (worst.optimizer or 0)
        do = f"FullyShard() takes about {shown_bytes(states / size)} on each worker for the same."
    else:
        do = "Use more workers that share the model, or a node with more memory."
    return (
        f"{par.skeleton.name} as {layout}: {where} {verb} {shown_bytes(coming)} beside its parameters ({worst}), and has {have} "
        f"free ({worst.limit}). {end} {do} Fewer workers on a node leave each more; memory_bytes= says what a worker has, if you "
        "know better."
    )


def _held(optimizer: torch.optim.Optimizer | None) -> int:
    states: list[Mapping[str, Any]] = list(optimizer.state.values()) if optimizer is not None else []
    return sum(local(value).nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _tell(own: MemoryPlan, rank: int) -> None:
    """Write it where a failure report looks; not worth a training where that can't be."""
    run_dir, attempt = os.environ.get("PACELINE_RUN_DIR"), os.environ.get("PACELINE_ATTEMPT")
    if not run_dir or not attempt:
        return
    path = os.path.join(run_dir, "attempts", attempt, f"memory_{rank}.json")
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(asdict(own), file)
        os.replace(f"{path}.new", path)
    except OSError:
        return
