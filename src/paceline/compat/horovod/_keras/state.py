"""Exchange of a Keras model's and optimizer's variables between ranks, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.numbers import Array
from paceline.compat.horovod._keras import reducing
from paceline.compat.horovod._keras.settings import key_of
from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.handles import allreduce_async, as_type, broadcast_async_, plain
from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average
from paceline.compat.horovod.common.types import Optimizer, Variable


def optimizer_variables(optimizer: Optimizer | None) -> list[Variable]:
    """Return the optimizer's variables, with learning rate and loss scale."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    # `variables` is a property in Keras 3, but a method in older versions.
    tracked = list(variables() if callable(variables) else variables)
    # In tf_keras, `optimizer.variables` lacks the optimizer's assignable settings and the state of its loss scale.
    own, scale = reducing.inner_of(optimizer) or optimizer, getattr(optimizer, "_loss_scale", None)
    settings = getattr(own, "_hyper", None) or {"learning_rate": getattr(own, "_learning_rate", None)}
    apart = [settings[name] for name in sorted(settings)]
    apart += [getattr(scale, "current_loss_scale", None), getattr(scale, "counter", None)]
    known = {key_of(variable) for variable in tracked}
    return tracked + [value for value in apart if hasattr(value, "assign") and key_of(value) not in known]


def build_optimizer(optimizer: Optimizer | None, trainable_variables: Sequence[Variable]) -> None:
    """Create the optimizer's variables unless they exist."""
    if optimizer is None:
        return
    inner = reducing.inner_of(optimizer)
    legacy = optimizer if inner is None else inner
    # Optimizers in `optimizers.legacy` have this method in place of `build`.
    if hasattr(legacy, "_create_all_weights"):
        legacy._create_all_weights(trainable_variables)
    elif not getattr(optimizer, "built", False) and not getattr(optimizer, "_built", False):
        optimizer.build(trainable_variables)


def learning_rate_of(optimizer: Optimizer) -> float:
    """Return the learning rate that the optimizer uses now."""
    import numpy as np

    optimizer = reducing.inner_of(optimizer) or optimizer
    # First read `_learning_rate`, which may be a schedule. The property `learning_rate` of Keras 3 only returns a number.
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        rate = optimizer.learning_rate
    if callable(rate) and not hasattr(rate, "assign"):
        raise ValueError(
            f"the optimizer's learning rate is {type(rate).__name__}, a schedule that sets the rate. Give the optimizer a "
            "number, or leave the learning-rate callback out."
        )
    return float(np.asarray(rate.numpy() if hasattr(rate, "numpy") else rate))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    (reducing.inner_of(optimizer) or optimizer).learning_rate = rate


def velocities(optimizer: Optimizer) -> list[Variable]:
    """Return the momentum variables of SGD and RMSprop."""
    optimizer = reducing.inner_of(optimizer) or optimizer
    if not getattr(optimizer, "momentum", None):
        return []
    momenta = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    if momenta is None and hasattr(optimizer, "get_slot_names") and "momentum" in optimizer.get_slot_names():
        momenta = [variable for variable in optimizer_variables(optimizer) if "/momentum" in variable.name]
    return [variable for variable in momenta or () if variable is not None]


def broadcast_variables(variables: Sequence[Variable], root_rank: int, name: str) -> None:
    """Set the variables to the values of `root_rank`."""
    # The variables may belong to TensorFlow, or to any backend of Keras 3. All of them have `numpy()` and `assign()`.
    import numpy as np

    # Copy the values, because the engine overwrites the arrays.
    sent = [plain(np.array(variable.numpy())) for variable in variables]
    under_way = [broadcast_async_(array, root_rank, f"{name}.{index}") for index, array in enumerate(sent)]
    for variable, array, handle in zip(variables, sent, under_way, strict=True):
        handles.synchronize(handle)
        if basics.rank() != root_rank:
            variable.assign(as_type(array, variable.numpy()))


def average(array: Array, name: str) -> Array:
    """Return the ranks' average of a float array."""
    averaged: Array = handles.synchronize(allreduce_async(array, ENGINE_NAMES[Average], name))
    return averaged
