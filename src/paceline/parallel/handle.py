"""The part that checks and checkpoints need of the handle of `parallelize` (`training.Parallel`), which stands above them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from paceline.parallel.executor import Executor
from paceline.parallel.forecast.predict import Measured
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.mesh import World
from paceline.parallel.task import Task


class Progressed(Protocol):
    """The position of the training."""

    @property
    def steps(self) -> int: ...


class ParallelHandle(Protocol):
    """A model in its layout, with its optimizer; each member as `training.Parallel` describes it."""

    task: Task
    optimizer: torch.optim.Optimizer | None
    world: World
    skeleton: Any
    measured: Measured | None
    memory: Any
    averages: list[Any]

    @property
    def progress(self) -> Progressed: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def gradient_hooks(self) -> dict[str, Hooks]: ...

    def executor_for(self, batch: Any) -> Executor: ...

    def settle_buffers(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...
