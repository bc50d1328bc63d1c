"""DistributedOptimizer: an optimizer that averages gradients over the ranks before it uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from paceline.compat.horovod._keras import reducing
from paceline.compat.horovod._keras.keras2 import DistributedKeras2, DistributedLegacy
from paceline.compat.horovod._keras.reducing import Distribution, accumulator_of
from paceline.compat.horovod._keras.settings import KERAS_2, KERAS_3, KerasSettings, key_of, name_of
from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, NoneCompressor, checked_layers, chosen_groups
from paceline.compat.horovod.common.types import Groups, Layers, OptimizerOfKeras3, Variable

O = TypeVar("O")  # noqa: E741


def DistributedOptimizer(  # noqa: N802
    optimizer: O,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> O:
    """Return the optimizer as an instance of a class that reduces gradients.

    The new optimizer shares variables and settings with `optimizer`. Saved models contain it as an optimizer of the
    original class. If `optimizer` is distributed already, the result has the new settings. For a LossScaleOptimizer,
    replace its inner optimizer, and return the same LossScaleOptimizer.

    Ranks match gradients by names with the prefix `name`. Before the reduction, the gradients of
    `backward_passes_per_step` passes are summed, or averaged with `average_aggregated_gradients`. `iterations` counts
    reductions, not passes. device_dense and device_sparse have no effect.

    Raises:
        ValueError: The arguments contradict each other, or `optimizer` is not a Keras optimizer.
    """
    settings = KerasSettings(
        op=op,
        compression=compression or NoneCompressor,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=float(gradient_predivide_factor),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        groups=chosen_groups(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        prefix=name or KerasSettings.prefix,
    )
    return distribute(optimizer, settings)


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: O,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Layers = None,
    scale_local_gradients: bool = True,
) -> O:
    """Return a DistributedOptimizer that does not reduce gradients of `local_layers`.

    Gradients of `local_layers` stay on their rank. `scale_local_gradients` divides them by the number of ranks.

    Raises:
        ValueError: DistributedOptimizer would raise it, or an item of `local_layers` has no weights.
    """
    settings = KerasSettings(
        op=op,
        compression=compression or NoneCompressor,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=float(gradient_predivide_factor),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        prefix=name or KerasSettings.prefix,
        local_layers=checked_layers(local_layers, "trainable_weights"),
    )
    return distribute(optimizer, settings)


def distribute(optimizer: O, settings: KerasSettings, *, in_place: bool = False) -> O:
    """Return the optimizer as an instance of a class that reduces gradients by `settings`.

    Raises:
        ValueError: `optimizer` is not a Keras optimizer, or both Keras and these settings accumulate gradients.
    """
    library = name_of(optimizer)
    base = _bare_class(optimizer)
    mixin = _mixin_for(optimizer, library)
    inner = reducing.inner_of(optimizer)
    if inner is not None:
        reducing.set_inner(optimizer, distribute(inner, settings))
        return optimizer
    own_passes = getattr(optimizer, "gradient_accumulation_steps", None)
    if settings.passes > 1 and own_passes:
        raise ValueError(
            f"backward_passes_per_step={settings.passes} and gradient_accumulation_steps="
            f"{own_passes} both accumulate gradients: give one of them."
        )
    assert library is not None
    # Copy the settings with an empty set, so that `register_local_var` of this optimizer changes no other optimizer.
    distribution = Distribution(dataclasses.replace(settings, local_variables=set()), library)
    if library == KERAS_3:
        reducing.install()
    # Keras uses `__class__` when it saves or copies an optimizer. Let it return the class without the mixin.
    names = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__class__": property(lambda self: base),
        "distribution": distribution,
    }
    cls: Any = type(base.__name__, (mixin, base), names)
    if in_place:
        optimizer.__class__ = cls
        return optimizer
    made: O = cls.__new__(cls)
    # `made` and `optimizer` share a `__dict__`, so that a change of either optimizer also changes the other.
    object.__setattr__(made, "__dict__", vars(optimizer))
    return made


def _bare_class(optimizer: object) -> type:
    """Return the optimizer's class without an earlier DistributedOptimizer's mixin."""
    cls = type(optimizer)
    # A class from `distribute` has two base classes: the mixin first, and then the optimizer's own class.
    return cls.__bases__[1] if "distribution" in vars(cls) else cls


def _mixin_for(optimizer: object, library: str | None) -> type:
    # Compare names of classes: isinstance would need both versions of Keras to be loaded, but a script uses only one version.
    names = {f"{cls.__module__}.{cls.__name__}" for cls in type(optimizer).__mro__}
    if library == KERAS_3 and any(name.endswith(".BaseOptimizer") for name in names):
        return DistributedKeras3
    if library == KERAS_2 and "tf_keras.src.optimizers.optimizer.Optimizer" in names:
        return DistributedKeras2
    if library == KERAS_2 and any(name.endswith("optimizer_v2.OptimizerV2") for name in names):
        return DistributedLegacy
    raise ValueError(
        f"{optimizer!r} is not an optimizer of Keras. Give an instance, such as keras.optimizers.Adam(0.001 * hvd.size()); "
        "an optimizer of tf.compat.v1.train is for horovod.tensorflow's DistributedOptimizer."
    )


class DistributedKeras3(OptimizerOfKeras3):
    """A mixin that reduces gradients, for optimizer classes of Keras 3.

    After the reduction, the optimizer itself does clipping, weight decay, moving averages and the update.
    """

    distribution: ClassVar[Distribution]

    def apply(self, grads: Iterable[object], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Reduce gradients and update the variables.

        With several backward passes, the earlier passes only add to the sums. The last pass reduces and updates.
        """
        update, grads = super().apply, list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables is not None and len(variables) != len(grads):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables: give one for each.")
        known = self._trainable_variables if variables is None and self.built else variables
        if known is None or len(known) != len(grads) or self.gradient_accumulation_steps:
            # If Keras accumulates gradients, `_clip_gradients` reduces them later. Keras also checks the arguments.
            update(grads, variables)
        elif self.distribution.settings.passes > 1:
            self._apply_after_passes(update, grads, known)
        else:
            update(self.distribution.reduce(grads, known), variables)

    def register_local_var(self, variable: Variable) -> None:
        """Exclude this variable's gradient from the reduction over ranks."""
        self.distribution.settings.local_variables.add(key_of(variable))

    def _backend_apply_gradients(self, grads: list[object], trainable_variables: Iterable[Variable]) -> None:
        self.__dict__["_being_applied"] = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Iterable[object]) -> list[object]:
        # If Keras accumulates gradients, it calls this only in a step's last pass. So the ranks reduce only sums.
        if self.gradient_accumulation_steps:
            grads = self.distribution.reduce(list(grads), self.__dict__["_being_applied"])
        return super()._clip_gradients(grads)

    def _apply_after_passes(
        self, update: Callable[..., None], grads: list[object], variables: Sequence[Variable]
    ) -> None:
        if not self.built:
            from keras.src import backend

            with backend.name_scope(self.name, caller=self):
                self.build(variables)

        def step(sums: list[object]) -> None:
            update(self.distribution.reduce(sums, variables), variables)

        accumulator_of(self, variables).step(grads, variables, step)
