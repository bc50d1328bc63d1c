"""Accumulation of several backward passes' gradients before the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.names import key, raw


class Accumulator:
    """A sum or average of this rank's gradients over `passes` backward passes.

    The arguments are Horovod's `backward_passes_per_step` and `average_aggregated_gradients`.
    """

    def __init__(self, passes: int, average: bool = False) -> None:
        if passes < 1:
            raise ValueError("backward_passes_per_step must be > 0")
        self.passes, self.average = passes, average
        self._count: tf.Variable | None = None
        # Key of a model's variable -> variable with the sum of its gradients. The sums belong to no model and no checkpoint.
        self._sums: dict[int, tf.Variable] = {}

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes before each optimizer step."""
        return self.passes

    @property
    def average_aggregated_gradients(self) -> bool:
        """Whether accumulated gradients are averaged, not summed."""
        return self.average

    @property
    def counter(self) -> tf.Variable | int:
        """The variable that counts this step's backward passes."""
        return 0 if self._count is None else self._count

    def step(
        self,
        grads: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        act: Callable[[list[tf.Tensor | None]], object],
    ) -> tf.Tensor:
        """Add these gradients, and call `act` with the sums after the last backward pass.

        Return a boolean tensor, which is True if `act` was called. A gradient is a tensor, tf.IndexedSlices or None. A
        sum is a tensor, or None if the variable never had a gradient. In a graph, `act` is traced once and its result
        is dropped, so `act` must change variables to have an effect.
        """
        listed = list(grads)
        if self.passes == 1:
            act(listed)
            return tf.constant(True)
        counter = self._prepare(listed, variables)
        sums = [self._sums.get(key(variable)) for variable in variables]
        added = [_add(total, grad) for total, grad in zip(sums, listed, strict=True) if grad is not None]
        count = counter.assign_add(1, read_value=not tf.executing_eagerly())
        # A TensorFlow 1 graph does not keep the order of operations. Update the sums and the counter before the check below.
        with tf.control_dependencies([*added, count]):
            is_due = tf.convert_to_tensor(counter) >= self.passes

        def due() -> tf.Tensor:
            values = [None if total is None else self._value(total) for total in sums]
            reached = [value for value in values if value is not None]
            # Read the sums, then set them to 0, then call `act`: if it raises an exception, the next step starts at 0.
            with tf.control_dependencies(reached):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums if total is not None]
                cleared.append(counter.assign(0))
            with tf.control_dependencies(cleared):
                done = act(values)
            with tf.control_dependencies([done] if isinstance(done, (tf.Tensor, tf.Operation)) else cleared):
                return tf.constant(True)

        if tf.executing_eagerly():
            return due() if bool(is_due) else tf.constant(False)
        return tf.cond(is_due, due, lambda: tf.constant(False))

    def _value(self, total: tf.Variable) -> tf.Tensor:
        value = tf.identity(total)
        return value / self.passes if self.average else value

    def _prepare(self, grads: Sequence[Gradient], variables: Sequence[tf.Variable]) -> tf.Variable:
        """Create missing variables, and return the variable that counts the passes."""
        # Create the variables outside of a function that is being traced, because they must outlive the function's graph.
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, dtype=tf.int32, trainable=False, name="backward_passes")
            for grad, variable in zip(grads, variables, strict=True):
                if grad is not None and key(variable) not in self._sums:
                    own = raw(variable)
                    self._sums[key(variable)] = tf.Variable(
                        tf.zeros(own.shape, grad.dtype), trainable=False, name="gradient_sum"
                    )
        return self._count


def _add(total: tf.Variable, grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    if isinstance(grad, tf.IndexedSlices):
        return total.scatter_add(grad)
    return total.assign_add(grad)
