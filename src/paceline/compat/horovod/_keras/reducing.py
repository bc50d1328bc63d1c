"""Reduction of gradients by the framework's collectives, and hooks into Keras 3.

    Trainer._resolve_auto_jit_compile   XLA cannot call Python, so "auto" means: without XLA
    model_supports_jit                  refuses a script's jit_compile=True, with the reason
    LossScaleOptimizer.check_finite     skips a step on all ranks or on none; otherwise the next collective would hang

For optimizers that are not distributed, all three hooked functions keep their behavior.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

from paceline.compat.horovod._keras.settings import KerasSettings, backend_of, key_of
from paceline.compat.horovod.common.process_sets import registered_ranks
from paceline.compat.horovod.common.types import Optimizer, Variable

T = TypeVar("T")


class Accumulator(Protocol):
    """A sum of each variable's gradients over several backward passes."""

    def step(self, grads: list[Any], variables: Sequence[Any], act: Callable[[list[Any]], object]) -> object:
        """Add gradients. After the last pass, call `act(sums)`. Return whether `act` was called."""


class Distributed(Protocol):
    """An optimizer whose class reduces gradients over the ranks."""

    distribution: ClassVar[Distribution]


class Distribution:
    """A reduction of one optimizer's gradients over the ranks, for the Keras `library`."""

    def __init__(self, settings: KerasSettings, library: str) -> None:
        self.settings, self.library = settings, library
        self._side = side_of(backend_of(library))

    def reduce(self, grads: Sequence[object], variables: Sequence[Variable]) -> list[Any]:
        """Return the reduced gradients in the same order.

        Gradients of local variables are not reduced, but with `settings.scale_local_gradients` divided by the number of
        ranks. A rank outside the process set keeps its gradients.
        """
        size = len(registered_ranks(self.settings.process_set))
        if size == 1 and os.environ.get("HOROVOD_ELASTIC") != "1":
            # With a single rank, there is nothing to reduce. Check this each time, because an elastic job may grow.
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

    def on_all_ranks(self, condition: object) -> object:
        """Return whether the condition holds on every rank."""
        is_alone = len(registered_ranks(self.settings.process_set)) == 1 or not self.settings.process_set.included()
        return condition if is_alone else self._side.on_all_ranks(condition, self.settings)

    def accumulator(self) -> Accumulator:
        """Return a new accumulator of gradients over several backward passes."""
        made: Accumulator = self._side.Accumulator(self.settings.passes, self.settings.average_passes)
        return made


def accumulator_of(optimizer: Distributed, variables: Sequence[Variable]) -> Accumulator:
    """Return the optimizer's accumulator of these variables' gradients, created on first use."""
    # Bypass __setattr__, because Keras would track the attribute.
    kept: dict[tuple[int, ...], Accumulator] = vars(optimizer).setdefault("_accumulators", {})
    key = tuple(key_of(variable) for variable in variables)
    if key not in kept:
        kept[key] = optimizer.distribution.accumulator()
    return kept[key]


def side_of(backend: str) -> ModuleType:
    """Return the module that handles tensors of this Keras backend."""
    if backend == "torch":
        from paceline.compat.horovod._keras import torch_side

        return torch_side
    from paceline.compat.horovod._keras import tensorflow_side

    return tensorflow_side


def distribution_of(optimizer: object) -> Distribution | None:
    """Return the optimizer's `Distribution`, or None if it reduces no gradients."""
    inner = inner_of(optimizer)
    distribution = getattr(type(optimizer if inner is None else inner), "distribution", None)
    return distribution if isinstance(distribution, Distribution) else None


def inner_of(optimizer: Any) -> Optimizer | None:
    """Return the optimizer inside a LossScaleOptimizer, or None for other optimizers."""
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    return optimizer.inner_optimizer if names & {"LossScaleOptimizer", "LossScaleOptimizerV3"} else None


def set_inner(optimizer: object, inner: object) -> None:
    # In tf_keras the public attribute has no setter, so set the private attribute.
    name = "inner_optimizer" if "inner_optimizer" in vars(optimizer) else "_optimizer"
    vars(optimizer)[name] = inner


def install() -> None:
    """Replace three functions of Keras 3 by functions that support distributed optimizers."""
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from keras.src.trainers import trainer

    if getattr(trainer, "_knows_distributed_optimizers", False):
        return
    trainer._knows_distributed_optimizers = True
    has_auto = hasattr(trainer.Trainer, "_resolve_auto_jit_compile")
    if has_auto:
        trainer.Trainer._resolve_auto_jit_compile = _without_xla(trainer.Trainer._resolve_auto_jit_compile)
    # Keras before 3.2 also calls `model_supports_jit` if jit_compile="auto". Then it must not raise an exception.
    trainer.model_supports_jit = _refusing_xla(trainer.model_supports_jit, raises=has_auto)
    LossScaleOptimizer.check_finite = _together(LossScaleOptimizer.check_finite)


def _without_xla(resolve: Callable[[T], bool]) -> Callable[[T], bool]:
    @functools.wraps(resolve)
    def resolved(self: T) -> bool:
        return False if distribution_of(getattr(self, "optimizer", None)) else bool(resolve(self))

    return resolved


def _refusing_xla(supports: Callable[[T], bool], *, raises: bool) -> Callable[[T], bool]:
    @functools.wraps(supports)
    def supported(model: T) -> bool:
        if not distribution_of(getattr(model, "optimizer", None)):
            return bool(supports(model))
        if raises:
            raise ValueError(
                "jit_compile=True with a DistributedOptimizer: a program that XLA has compiled can't call a collective. "
                "Leave jit_compile out of model.compile, or say jit_compile=False."
            )
        return False

    return supported


def _together(check_finite: Callable[[T, object], object]) -> Callable[[T, object], object]:
    @functools.wraps(check_finite)
    def checked(self: T, grads: object) -> object:
        # Every rank must call the collective `on_all_ranks` below, even if its own gradients are finite.
        finite, distribution = check_finite(self, grads), distribution_of(self)
        return finite if distribution is None else distribution.on_all_ranks(finite)

    return checked
