"""Gradients over the ranks: what is to be sent, and by which framework's collectives."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from paceline.compat.horovod._keras.libraries import backend_of
from paceline.compat.horovod._keras.settings import KerasSettings, key_of
from paceline.compat.horovod.common.process_sets import registered_ranks


class Distribution:
    """The reduction of one optimizer's gradients. library: the Keras that the optimizer is of."""

    def __init__(self, settings: KerasSettings, library: str) -> None:
        self.settings, self.library = settings, library
        self._side = side_of(backend_of(library))

    def reduce(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients after their reduction, in the same order; None where there was none.

        Those of local variables stay on their rank, divided by the number of ranks unless that is switched off. A rank
        outside the process set keeps all of its own.
        """
        size = len(registered_ranks(self.settings.process_set))
        if size == 1 and os.environ.get("HOROVOD_ELASTIC") != "1":
            # A world of one changes nothing; one that may grow is asked each time.
            return list(grads)
        local = self.settings.local_keys()
        shared = [index for index, variable in enumerate(variables) if key_of(variable) not in local]
        result = list(grads)
        if self.settings.scale_local_gradients:
            for index in set(range(len(result))) - set(shared):
                result[index] = None if grads[index] is None else self._side.divided(grads[index], size)
        if shared and self.settings.process_set.included():
            reduced = self._side.reduce(
                [grads[index] for index in shared], [variables[index] for index in shared], self.settings
            )
            for index, grad in zip(shared, reduced, strict=True):
                result[index] = grad
        return result

    def on_all_ranks(self, condition: Any) -> Any:
        """A tensor that is true if the given one is on every rank of the process set."""
        is_alone = len(registered_ranks(self.settings.process_set)) == 1 or not self.settings.process_set.included()
        return condition if is_alone else self._side.on_all_ranks(condition, self.settings)

    def accumulator(self) -> Any:
        """A new one for the gradients of several passes; its `step(grads, variables, act)` calls `act` with the sums."""
        return self._side.Accumulator(self.settings.passes, self.settings.average_passes)


def accumulator_of(optimizer: Any, variables: list[Any]) -> Any:
    """The optimizer's accumulator for these variables: the same one each time."""
    # Past __setattr__, which would have Keras track it.
    kept = vars(optimizer).setdefault("_accumulators", {})
    key = tuple(key_of(variable) for variable in variables)
    if key not in kept:
        kept[key] = optimizer.distribution.accumulator()
    return kept[key]


def side_of(backend: str) -> ModuleType:
    """The module that works with this backend's tensors."""
    if backend == "torch":
        from paceline.compat.horovod._keras import torch_side

        return torch_side
    from paceline.compat.horovod._keras import tensorflow_side

    return tensorflow_side
