"""The places where Keras itself has to know that an optimizer is distributed.

    Trainer._resolve_auto_jit_compile   XLA can't call Python, so "auto" means: without XLA
    model_supports_jit                  asked where the script has said jit_compile=True: refused, with the reason
    LossScaleOptimizer.check_finite     a step is skipped on all ranks or on none, or the next collective would never end

All three do what they did where an optimizer is not distributed.
"""

from __future__ import annotations

import functools
from typing import Any

from paceline.compat.horovod._keras.reducing import Distribution


def distribution_of(optimizer: Any) -> Distribution | None:
    """The distribution of the optimizer, or of the one within it; None if it isn't."""
    inner = inner_of(optimizer)
    distribution = getattr(type(optimizer if inner is None else inner), "distribution", None)
    return distribution if isinstance(distribution, Distribution) else None


def inner_of(optimizer: Any) -> Any:
    """The optimizer in a LossScaleOptimizer; None for any other."""
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    return optimizer.inner_optimizer if names & {"LossScaleOptimizer", "LossScaleOptimizerV3"} else None


def set_inner(optimizer: Any, inner: Any) -> None:
    """Put another optimizer into a LossScaleOptimizer: the same variables under another class."""
    # tf_keras gives the attribute without a setter.
    name = "inner_optimizer" if "inner_optimizer" in vars(optimizer) else "_optimizer"
    vars(optimizer)[name] = inner


def install() -> None:
    """Put the hooks into Keras 3, once."""
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from keras.src.trainers import trainer

    if getattr(trainer, "_knows_distributed_optimizers", False):
        return
    trainer._knows_distributed_optimizers = True
    has_auto = hasattr(trainer.Trainer, "_resolve_auto_jit_compile")
    if has_auto:
        trainer.Trainer._resolve_auto_jit_compile = _without_xla(trainer.Trainer._resolve_auto_jit_compile)
    # Releases before 3.2 ask it for "auto", too, where it must not raise.
    trainer.model_supports_jit = _refusing_xla(trainer.model_supports_jit, raises=has_auto)
    LossScaleOptimizer.check_finite = _together(LossScaleOptimizer.check_finite)


def _without_xla(resolve: Any) -> Any:
    @functools.wraps(resolve)
    def resolved(self: Any) -> bool:
        return False if distribution_of(getattr(self, "optimizer", None)) else bool(resolve(self))

    return resolved


def _refusing_xla(supports: Any, *, raises: bool) -> Any:
    @functools.wraps(supports)
    def supported(model: Any) -> bool:
        if not distribution_of(getattr(model, "optimizer", None)):
            return bool(supports(model))
        if raises:
            raise ValueError(
                "jit_compile=True with a DistributedOptimizer: a program that XLA has compiled can't call a collective. "
                "Leave jit_compile out of model.compile, or say jit_compile=False."
            )
        return False

    return supported


def _together(check_finite: Any) -> Any:
    @functools.wraps(check_finite)
    def checked(self: Any, grads: Any) -> Any:
        # Every rank asks each time, whatever its own gradients are like: it is a collective.
        finite, distribution = check_finite(self, grads), distribution_of(self)
        return finite if distribution is None else distribution.on_all_ranks(finite)

    return checked
