"""A Keras model and optimizer as elastic state, with callbacks that update it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

from paceline.collectives.numbers import Array
from paceline.compat.horovod._keras.state import broadcast_variables, build_optimizer, optimizer_variables
from paceline.compat.horovod.common import elastic
from paceline.compat.horovod.common.elastic import State, VariablesState
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.common.types import KerasModel, Optimizer, Variable

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Wrap `func(state, ...)` so that it restarts from the last commit.

    If a collective fails, eagerly or in a TensorFlow graph, the engine of collectives restarts. Then every rank gets
    the first rank's last commit, and `func` is called with the restored state.
    """

    @functools.wraps(func)
    def translated(*args: object, **kwargs: object) -> T:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, HorovodInternalError) and _is_from_a_graph(error):
                raise HorovodInternalError(str(error)) from error
            raise

    return elastic.run(translated)


class KerasState(VariablesState):
    """A model, its optimizer, and plain values, each an attribute.

    `optimizer` defaults to the model's optimizer. `backend` has no effect. `kwargs` are plain values, such as `epoch=0,
    batch=0`, which commits keep without copying.

    Raises:
        ValueError: The model is not built, so its weights are unknown.
    """

    def __init__(
        self, model: KerasModel, optimizer: Optimizer | None = None, backend: object = None, **kwargs: object
    ) -> None:
        if not model.built:
            raise ValueError(
                f"the model {model.name!r} has no weights yet. Give it an input shape, or call model.build(input_shape), "
                "before KerasState(model)."
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        # Create the optimizer's variables now, because a commit saves them. The optimizer would create them in its first step.
        build_optimizer(self.optimizer, model.trainable_variables)
        super().__init__(**kwargs)

    def _variables(self) -> list[Variable]:
        return [*self.model.weights, *optimizer_variables(self.optimizer)]

    def _read(self) -> list[Array]:
        import numpy as np

        return [np.array(variable.numpy()) for variable in self._variables()]

    def _write(self, values: list[Array]) -> None:
        # With strict=True, this raises an error if the model has more variables than it had at the commit.
        for variable, array in zip(self._variables(), values, strict=True):
            variable.assign(array)

    def _spread(self) -> None:
        broadcast_variables(self._variables(), 0, "elastic_state")


class CommitState:
    """A callback that commits the state after `batches_per_commit` batches.

    The commit happens when the next batch or epoch begins, or when the training ends. By then all callbacks in the list
    have updated the state.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit}: it must be at least 1.")
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches, self._is_due = 0, False

    def on_train_begin(self, logs: object = None) -> None:
        self._batches, self._is_due = 0, False

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._batches += 1
        self._is_due = self._is_due or self._batches % self.batches_per_commit == 0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._commit()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._commit()

    def on_train_end(self, logs: object = None) -> None:
        self._commit()

    def _commit(self) -> None:
        if self._is_due:
            # Clear the flag first: if `commit` raises an exception that ends `fit`, the next `fit` must not commit.
            self._is_due = False
            self.state.commit()


class _BatchState(Protocol):
    batch: int


class UpdateBatchState:
    """A callback that counts an epoch's batches in `state.batch`.

    The count is 0 between epochs. To resume in the middle of an epoch, call `fit` with the remaining batches:
    `dataset.skip(state.batch)` and `steps_per_epoch=steps - state.batch`. The count then continues from `state.batch`.
    """

    def __init__(self, state: _BatchState) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0

    def on_train_begin(self, logs: object = None) -> None:
        self._done_before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.state.batch = self._done_before + batch + 1

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._done_before = self.state.batch = 0


class _EpochState(Protocol):
    epoch: int


class UpdateEpochState:
    """A callback that counts completed epochs in `state.epoch`, for any `initial_epoch`."""

    def __init__(self, state: _EpochState) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0
        self._first: int | None = None

    def on_train_begin(self, logs: object = None) -> None:
        self._done_before, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.state.epoch = self._done_before + epoch - (self._first or 0) + 1


def _is_from_a_graph(error: Exception) -> bool:
    return type(error).__module__.startswith("tensorflow.") and HorovodInternalError.__name__ in str(error)
