"""DistributedOptimizer for optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import tensorflow as tf

from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, chosen_groups
from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.gradient_aggregation import Accumulator
from paceline.compat.horovod.tensorflow.names import key
from paceline.compat.horovod.tensorflow.reduction import Reduction, distributed, reduce_gradients

Pair: TypeAlias = "tuple[Gradient, tf.Variable]"


def DistributedOptimizer(  # noqa: N802
    optimizer: tf.keras.optimizers.Optimizer | tf.compat.v1.train.Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[tf.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.keras.optimizers.Optimizer | tf.compat.v1.train.Optimizer:
    """Return the optimizer as an instance of a class that reduces gradients.

    The new optimizer shares variables and settings with `optimizer`, which is of Keras 3, of tf_keras, or of tf.compat.v1.train.

    Before the reduction, the gradients of `backward_passes_per_step` passes are summed, or averaged with
    `average_aggregated_gradients`. Only the last of these passes changes the variables. `op` is hvd.Average or hvd.Sum;
    tf.compat.v1.train also allows hvd.Adasum. use_locking, device_dense and device_sparse have no effect.

    Raises:
        ValueError: The arguments contradict each other, or `optimizer` is of another kind.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        how = Reduction(
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=float(gradient_predivide_factor),
            groups=chosen_groups(groups, num_groups),
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            prefix=name or f"Distributed{type(optimizer).__name__}",
        )
        return _of_tensorflow_1(optimizer, how, Accumulator(backward_passes_per_step, average_aggregated_gradients))
    from paceline.compat.horovod._keras.optimizer import DistributedOptimizer as OfKeras

    return OfKeras(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def _of_tensorflow_1(
    optimizer: tf.compat.v1.train.Optimizer, how: Reduction, accumulator: Accumulator
) -> tf.compat.v1.train.Optimizer:
    made = distributed(optimizer, _Distributed1, "optimizer")
    made._how, made._accumulator, made._local_variables = how, accumulator, {}
    return made


class _Distributed1:
    """A mixin that reduces gradients, for optimizer classes of tf.compat.v1.train.

    Gradients are reduced when the script computes them, so that the script can clip reduced gradients. With several
    passes, the gradients are reduced when the last pass applies them.
    """

    _how: Reduction
    _accumulator: Accumulator
    _local_variables: dict[int, tf.Variable]

    def register_local_var(self, variable: tf.Variable) -> None:
        """Exclude the gradient of this variable from the reduction."""
        self._local_variables[key(variable)] = variable

    def compute_gradients(self, *args: object, **kwargs: object) -> list[Pair]:
        """Return (gradient, variable) pairs, reduced over the ranks."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        if self._accumulator.passes > 1:
            return list(pairs)
        return self._reduced([grad for grad, _ in pairs], [variable for _, variable in pairs])

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """Return the operation that updates the variables.

        With several backward passes, the earlier passes only add to the sums. The last pass updates the variables.
        """
        update = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if self._accumulator.passes == 1:
            return update(pairs, global_step, name)
        variables = [variable for _, variable in pairs]
        # Create the slot variables now: the last backward pass runs in a branch of `tf.cond`, which can't create variables.
        with tf.init_scope():
            self._create_slots([v for grad, v in pairs if grad is not None])  # type: ignore[attr-defined]
            self._prepare()  # type: ignore[attr-defined]
        return self._accumulator.step(
            [grad for grad, _ in pairs],
            variables,
            lambda sums: update(self._reduced(sums, variables), global_step, name),
        )

    def _reduced(self, grads: list[Gradient], variables: list[tf.Variable]) -> list[Pair]:
        reduced = reduce_gradients(grads, variables, self._how, self._local_variables.values())
        return list(zip(reduced, variables, strict=True))
