"""Callbacks for equal initial values, averaged metrics, and learning rate schedules.

Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017): section 2.2 describes the gradual warmup, and
remark 2 of section 3 the momentum correction.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType

from paceline.collectives.numbers import Array
from paceline.compat.horovod._keras import elastic, state
from paceline.compat.horovod._keras.settings import key_of
from paceline.compat.horovod._keras.state import (
    build_optimizer,
    learning_rate_of,
    optimizer_variables,
    set_learning_rate,
    velocities,
)
from paceline.compat.horovod.common import basics, objects
from paceline.compat.horovod.common.types import KerasModel, Variable


@functools.cache
def callbacks_for(keras: ModuleType) -> dict[str, type]:
    """Return the classes of `horovod.keras.callbacks` by name."""
    base = keras.callbacks.Callback
    return {
        "BestModelCheckpoint": _made(_BestModel, keras.callbacks.ModelCheckpoint, "BestModelCheckpoint"),
        "BroadcastGlobalVariablesCallback": _made(_Broadcast, base, "BroadcastGlobalVariablesCallback"),
        "LearningRateScheduleCallback": _made(LearningRateSchedule, base, "LearningRateScheduleCallback"),
        "LearningRateWarmupCallback": _made(Warmup, base, "LearningRateWarmupCallback"),
        "MetricAverageCallback": _made(_MetricAverage, base, "MetricAverageCallback"),
    }


@functools.cache
def elastic_callbacks_for(keras: ModuleType) -> dict[str, type]:
    """Return the classes of `horovod.keras.elastic` by name."""
    base = keras.callbacks.Callback
    return {
        "CommitStateCallback": _made(elastic.CommitState, base, "CommitStateCallback"),
        "UpdateBatchStateCallback": _made(elastic.UpdateBatchState, base, "UpdateBatchStateCallback"),
        "UpdateEpochStateCallback": _made(elastic.UpdateEpochState, base, "UpdateEpochStateCallback"),
    }


class _Broadcast:
    """A callback that broadcasts the model and the optimizer of `root_rank`.

    The callback sends the model's weights and the optimizer's variables once, before the first batch. A model without
    an input shape is sent after the first batch. `local_variables` are not sent. `device` has no effect.
    """

    model: KerasModel

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Variable] | None = None) -> None:
        super().__init__()
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        self._local = {key_of(variable) for variable in local_variables or ()}

    def register_local_var(self, variable: Variable) -> None:
        """Keep each rank's own value of this variable, instead of broadcasting."""
        self._local.add(key_of(variable))

    def on_train_begin(self, logs: object = None) -> None:
        if self.broadcast_done:
            return
        # The optimizer would create its variables in its first step. Create them now, so that they are sent with the weights.
        if self.model.built:
            build_optimizer(self.model.optimizer, self.model.trainable_variables)
        self.broadcast_done = self._send("begin")

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = self._send("first_batch")
        if not self.broadcast_done:
            raise ValueError(
                f"the ranks' models differ: rank {basics.rank()} has {self._described()}, others have more, fewer, or "
                "others. Build the same model, with the same optimizer, on every rank."
            )

    def _send(self, when: str) -> bool:
        """Broadcast the variables. Return False if shapes or dtypes differ between ranks."""
        variables = self._variables()
        shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
        ready = bool(variables) and self.model.built
        # Compare shapes and dtypes first, because a broadcast of different arrays would fail on every rank.
        everywhere = objects.allgather_object((ready, shapes), f"broadcast_callback.{when}")
        if not all(other == (True, shapes) for other in everywhere):
            return False
        state.broadcast_variables(variables, self.root_rank, "broadcast_callback")
        return True

    def _variables(self) -> list[Variable]:
        if not self.model.built:
            return []
        weights = [*self.model.weights, *optimizer_variables(self.model.optimizer)]
        return [variable for variable in weights if key_of(variable) not in self._local]

    def _described(self) -> str:
        return (
            f"{len(self.model.weights)} weights and {len(optimizer_variables(self.model.optimizer))} of the optimizer"
        )


class _MetricAverage:
    """A callback that averages each epoch's metrics over the ranks.

    Later callbacks in the list of callbacks see the averages. `device` has no effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        import numpy as np

        if logs is None or basics.size() == 1:
            return
        # Sort the metrics by name: ranks match the values by position, but their dicts may be ordered differently.
        values = {name: array for name in sorted(logs) if (array := _numbers(logs[name])) is not None}
        own = {name: array.shape for name, array in values.items()}
        # Exchange the names first: if a rank lacks a metric, the other ranks would wait for it forever.
        everywhere = objects.allgather_object(own, "metric_average.names")
        for rank, others in enumerate(everywhere):
            if others != everywhere[0]:
                raise ValueError(_difference(everywhere[0], others, rank))
        if not values:
            return
        flat = state.average(np.concatenate([array.ravel() for array in values.values()]), "metric_average.values")
        start = 0
        for name, array in values.items():
            part = flat[start : start + array.size].reshape(array.shape)
            start += array.size
            # Store a plain float, as Keras does, because a later callback may write the logs as JSON.
            logs[name] = part.item() if array.ndim == 0 else part


class _BestModel:
    """A callback that saves the best model on the first rank.

    The attribute `filepath` is the path of the saved model. It may be set until the training begins.
    """

    filepath: str | os.PathLike[str] | None

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        # Keras requires a path in the constructor. This placeholder is replaced when training begins.
        super().__init__(  # type: ignore[call-arg]
            filepath=filepath or "unset.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=False,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None if filepath is None else self.filepath

    def on_train_begin(self, logs: object = None) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file to save to: give it filepath='best.keras', or set its attribute filepath."
            )
        super().on_train_begin(logs)  # type: ignore[misc]

    # Keras calls this method at the end of a batch or epoch. Only rank 0 may save: the ranks would overwrite each other's file.
    def _save_model(self, *args: object, **kwargs: object) -> None:
        if basics.rank() == 0:
            super()._save_model(*args, **kwargs)  # type: ignore[misc]


def _made(implementation: type, base: type, name: str) -> type:
    # tf_keras reads these attributes of callbacks. With them, this Keras 3 callback also works in tf_keras's `fit`.
    hooks = {"_implements_train_batch_hooks": True, "_implements_test_batch_hooks": False}
    hooks |= {"_implements_predict_batch_hooks": False}
    answers = {question: lambda self, answer=answer: answer for question, answer in hooks.items()}
    names = {"__doc__": implementation.__doc__, "__module__": __name__}
    return type(
        name, (implementation, base), names if hasattr(base, "_implements_train_batch_hooks") else names | answers
    )


def _numbers(value: object) -> Array | None:
    import numpy as np

    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _difference(first: Mapping[str, object], other: Mapping[str, object], rank: int) -> str:
    lacks, more = sorted(first.keys() - other.keys()), sorted(other.keys() - first.keys())
    if not lacks and not more:
        wrong = [name for name in first if first[name] != other[name]]
        what = f"has {', '.join(wrong)} of another shape than rank 0"
    else:
        parts = [f"lacks {', '.join(lacks)}" if lacks else "", f"has {', '.join(more)} alone" if more else ""]
        what = " and ".join(part for part in parts if part) + f"; rank 0 has {', '.join(sorted(first))}"
    return (
        f"MetricAverageCallback: rank {rank} {what}. Every rank must have the same metrics at the end of an epoch: give "
        "all of them validation data, and the same metrics and callbacks."
    )


class LearningRateSchedule:
    """A callback that sets the learning rate.

    From `start_epoch` until before `end_epoch` the rate is `initial_lr * multiplier`. `multiplier` is a number, or a
    function of the epoch. With `staircase` the function is called at each epoch's first batch, else at every batch,
    with fractions of epochs. `momentum_correction` scales the optimizer's momentum by the same factor. Without
    `staircase`, `steps_per_epoch` is needed if Keras does not know the number of batches.
    """

    model: KerasModel
    params: dict[str, int] | None

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

    def on_train_begin(self, logs: object = None) -> None:
        if self.staircase:
            return
        self.steps_per_epoch = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: the number of batches in an epoch is unknown. Give it steps_per_epoch=<batches>."
            )

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if not self._is_on():
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
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
        # Compare with a tolerance, because the optimizer stores the rate as a float32, which changes its last digits.
        if self.momentum_correction and before > 0 and not math.isclose(before, after, rel_tol=1e-7):
            # The momentum is a constant in the graph. Scaling the velocity has the same effect on the next step.
            for velocity in velocities(optimizer):
                velocity.assign(velocity * (after / before))


class Warmup(LearningRateSchedule):
    """A callback that raises the learning rate batch by batch.

    During `warmup_epochs` epochs the rate grows linearly from `initial_lr` divided by the number of ranks to
    `initial_lr`. `verbose=1` prints a line at the end of the warmup.
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

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = learning_rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
