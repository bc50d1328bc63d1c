"""DistributedGradientTape: a tf.GradientTape whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, cast

import tensorflow as tf

from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, checked_layers, chosen_groups
from paceline.compat.horovod.common.types import KerasLayer, Layers
from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.names import by_place, key
from paceline.compat.horovod.tensorflow.reduction import Reduction, distributed, reduce_gradients

T = TypeVar("T", bound=tf.GradientTape)
#: Tensors or variables, or any structure of these that `tf.nest` accepts.
Nested: TypeAlias = object
Pair: TypeAlias = "tuple[tf.Variable, Gradient]"


def DistributedGradientTape(  # noqa: N802
    gradtape: T,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[tf.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> T:
    """Return the tape as an instance of a class that reduces gradients.

    The new tape shares the recording of `gradtape`. It may be created before or after the recording.

    Raises:
        ValueError: The arguments contradict each other, or `gradtape` is not a tape.
    """
    return PartialDistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        0,
        chosen_groups(groups, num_groups),
        process_set,
        None,
        scale_local_gradients,
    )


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: T,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[tf.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Layers = None,
    scale_local_gradients: bool = True,
) -> T:
    """Return a DistributedGradientTape that doesn't reduce gradients of `local_layers`.

    These gradients stay on their rank. `local_layers` is a Keras layer or several, which must have variables.

    Raises:
        ValueError: The arguments contradict each other, or an item of `local_layers` has no variables.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"{gradtape!r} is not a tf.GradientTape.")
    how = Reduction(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=float(gradient_predivide_factor),
        groups=chosen_groups(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        prefix="DistributedGradientTape",
    )
    made = distributed(gradtape, _Distributed, "tape")
    made._how, made._local = how, {}
    made._layers = checked_layers(local_layers, "trainable_variables")
    return cast(T, made)


class _Distributed:
    """A mixin that reduces gradients, for the class of a tf.GradientTape."""

    _how: Reduction
    _local: dict[int, tf.Variable]
    _layers: tuple[KerasLayer, ...]

    def gradient(
        self,
        target: Nested,
        sources: Nested,
        output_gradients: Nested = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Nested:
        """Return the reduced gradients, nested like `sources`."""
        grads = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        flat_grads = tf.nest.flatten(grads, expand_composites=False)
        labels = by_place(len(flat)) if use_generic_names else flat
        reduced = self._reduced(flat_grads, flat, labels)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: tf.Variable) -> None:
        """Exclude the gradient of this variable from the reduction."""
        self._local[key(source)] = source

    def get_local_and_global_gradients(
        self, target: Nested, sources: Nested, output_gradients: Nested = None, use_generic_names: bool = False
    ) -> tuple[list[Pair], list[Pair]]:
        """Return two lists of (source, gradient): one for local sources, one with reduced gradients."""
        # After this call, a tape that is not persistent can't be used again. TensorFlow's own `gradient` has this rule, too.
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        own = self._local_keys()
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, tf.nest.flatten(grads, expand_composites=False), strict=True))
        return [pair for pair in pairs if key(pair[0]) in own], [pair for pair in pairs if key(pair[0]) not in own]

    def _local_variables(self) -> list[tf.Variable]:
        weights = [weight for layer in self._layers for weight in layer.trainable_variables]
        return [*self._local.values(), *weights]

    def _local_keys(self) -> set[int]:
        return {key(variable) for variable in self._local_variables()}

    def _reduced(
        self, grads: list[Gradient], sources: list[tf.Variable], named: Sequence[tf.Variable]
    ) -> list[Gradient]:
        own = self._local_keys()
        local = [label for label, source in zip(named, sources, strict=True) if key(source) in own]
        return reduce_gradients(grads, list(named), self._how, local)
