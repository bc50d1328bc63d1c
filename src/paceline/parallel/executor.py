"""The interfaces between the training loop, the layouts, and the checks that use both.

    core.Plain          an executor of the whole model, on one process, replicated or sharded
    pipeline.build()    an executor of one or several stages of a pipeline

`Parallel` does the work that all layouts share: it cuts the batch, sets the random streams (one per replica and stage, before
each call), clips gradients, steps the optimizer and reports failures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.deterministic_rng import OrderState, RandomState
from paceline.parallel.failure import FailureWatch
from paceline.parallel.forecast.predict import Measured
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.mesh import World
from paceline.parallel.task import Task

if TYPE_CHECKING:
    from paceline.parallel.meta_model import Skeleton


class Executor(Protocol):
    """One rank's part of the computation in a layout.

    Every rank calls every method except `named_parameters`, in the same order.

    Attributes:
        program: A hash of the traced calls in the last step's first microbatch, equal on all ranks. 0 if nothing was traced.
        written: Name -> sum of magnitudes (`shard.size_of`) of each parameter that the last step's forward passes changed in
            place. A pipeline leaves it empty.
    """

    program: int
    written: dict[str, float]

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model. Names are those in the user's model."""
        ...

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the user's model.

        A tied parameter has its first name. If two stages have copies of one parameter, both return it under this name.
        """
        ...

    def train_step(self, micros: Sequence[Microbatch]) -> Tensor:
        """Run forward and backward passes. Return the sum of weight * loss.

        All ranks of the replica get the same sum. Before the call every `.grad` must be None. After `finish_gradients` each
        `.grad` is the gradient of the global mean loss.
        """
        ...

    def finish_gradients(self) -> None:
        """Sum the gradients over the replicas, and over stages with tied parameters."""
        ...

    def predict(self, micros: Sequence[Microbatch], consume: Callable[[object, Microbatch], Tensor]) -> Tensor:
        """Return the sum of consume(output, microbatch) over the replica's microbatches.

        `consume` returns 1-dim tensors of equal length. The model runs in its present mode (see `train`).
        """
        ...

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of all modules on this rank."""
        ...

    def begin_anew(self) -> None:
        """Let the next step find unused parameters again, after steps of a check."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of training: finished steps, epoch, and consumed samples."""

    steps: int = 0
    epoch: int = 0
    consumed: int = 0


class TrainingState(TypedDict):
    """The training's state in a checkpoint, apart from model and optimizer."""

    progress: dict[str, int]
    random: RandomState
    order: OrderState | None


class SavedAverage(Protocol):
    """The tensors and step counts of an average of weights, for checkpoints."""

    tensors: dict[str, Tensor]
    state: list[int]


class ParallelHandle(Protocol):
    """The interface of a model in its layout.

    `training.Parallel` implements it, and documents each member.
    """

    task: Task
    optimizer: torch.optim.Optimizer | None
    world: World
    skeleton: Skeleton
    measured: Measured | None
    watch: FailureWatch

    @property
    def averages(self) -> Sequence[SavedAverage]: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def gradient_hooks(self) -> dict[str, Hooks]: ...

    def executor_for(self, batch: object) -> Executor: ...

    def settle_buffers(self) -> None: ...

    def state(self) -> TrainingState: ...

    def load_state(self, state: TrainingState) -> None: ...
