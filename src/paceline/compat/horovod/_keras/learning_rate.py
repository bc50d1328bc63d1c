"""Callbacks that set the learning rate as the training goes on.

Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017): section 2.2 is the gradual warmup, and
remark 2 of section 3 the correction of momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.compat.horovod._keras.state import learning_rate_of, set_learning_rate, velocities
from paceline.compat.horovod.common import basics


class LearningRateSchedule:
    """Sets the learning rate to `initial_lr` times `multiplier`, from `start_epoch` until before `end_epoch`.

    multiplier: a number, or a function of the epoch. staircase: it is asked at each epoch's first batch; otherwise at
        every batch, with fractions of epochs.
    momentum_correction: where the optimizer's last step is in its momentum, it is scaled as the learning rate is.
    steps_per_epoch: batches in an epoch; needed without `staircase` where Keras doesn't know them.
    """

    model: Any
    params: dict[str, Any] | None

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None or initial_lr <= 0:
            raise ValueError(f"initial_lr={initial_lr!r}: give the learning rate that `multiplier` 1 stands for.")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase:
            return
        self.steps_per_epoch = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: nobody knows how many batches an epoch has. Give steps_per_epoch=<batches> to it."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._is_on():
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate_of(self.model.optimizer)

    def _is_on(self) -> bool:
        return self.current_epoch >= self.start_epoch and (
            self.end_epoch is None or self.current_epoch < self.end_epoch
        )

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = learning_rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        set_learning_rate(optimizer, after)
        # A rate that was read back from a float32 may differ in its last digits from what was set.
        if self.momentum_correction and before > 0 and not math.isclose(before, after, rel_tol=1e-7):
            # Once m * v with m scaled is m times the scaled v; and m itself is a constant of the compiled graph.
            for velocity in velocities(optimizer):
                velocity.assign(velocity * (after / before))


class Warmup(LearningRateSchedule):
    """Raises the learning rate in equal steps from `initial_lr`/size to `initial_lr`, batch by batch.

    initial_lr: the learning rate after the warmup, scaled by the number of ranks already. warmup_epochs: how long it takes.
    verbose: 1 says when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The batch's end counts, so that the last batch of the warmup has the whole learning rate.
            assert self.steps_per_epoch
            done = min((epoch + 1 / self.steps_per_epoch) / warmup_epochs, 1.0) if warmup_epochs else 1.0
            return (1 + (basics.size() - 1) * done) / basics.size()

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = learning_rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
