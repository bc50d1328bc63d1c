"""The computation of one replica: the line between the training loop and the layouts. Loaded on use: it imports torch.

    core.Plain          the whole model in one process, replicated or sharded
    pipeline.build()    one stage, or several, of a model that is cut

`Parallel` does what is the same for all: it cuts the batch, sets the random streams (one per replica and stage, set
before each call), clips, steps the optimizer and reports failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.forecast.predict import Measured
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.mesh import World
from paceline.parallel.task import Task


class Executor(Protocol):
    """One rank's part of the computation. Every method but `named_parameters` is called on all ranks in the same order.

    program: a number for what the last step's first microbatch went through, the same on all ranks; 0 without a trace.
    written: name -> size, of each parameter that the last step's forward passes have changed in place; of a pipeline none.
    """

    program: int
    written: dict[str, float]

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, under original names."""
        ...

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Original name -> this rank's parameter, a DTensor where it is sharded; of a tie only the first name.

        Two stages that hold copies of one tensor both list it, under the same name.
        """
        ...

    def train_step(self, micros: Sequence[Microbatch]) -> Tensor:
        """The replica's sum of weight * loss, 0-dim, the same on all its ranks; gradients are left in `.grad`.

        `.grad` is None before. After it and `finish_gradients` it is the gradient of the global mean loss.
        """
        ...

    def finish_gradients(self) -> None:
        """Sum the gradients over the replicas, and those of ties over the stages that hold them."""
        ...

    def predict(self, micros: Sequence[Microbatch], consume: Callable[[Any, Microbatch], Tensor]) -> Tensor:
        """The replica's sum of consume(output, micro), a vector of one shape, the same on all its ranks.

        Without gradients, in the mode that the module is in.
        """
        ...

    def train(self, mode: bool = True) -> None:
        """Set the mode of all that this rank holds."""
        ...

    def begin_anew(self) -> None:
        """Forget what earlier steps have shown of which parameters are used: one was only a comparison."""
        ...


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
