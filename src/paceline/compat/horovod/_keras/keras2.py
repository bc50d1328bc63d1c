"""What DistributedOptimizer adds to an optimizer of tf_keras: to the present kind, and to that of `optimizers.legacy`.

Both reduce gradients in a method of their own before they clip them; a LossScaleOptimizer around them calls it, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.compat.horovod._keras.reducing import Distribution, accumulator_of
from paceline.compat.horovod._keras.settings import key_of


class _DistributedKeras2:
    distribution: ClassVar[Distribution]

    def register_local_var(self, variable: Any) -> None:
        """Let the gradient of this variable stay on its rank."""
        self.distribution.settings.local_variables.add(key_of(variable))

    def _reduced(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        if self.distribution.settings.passes > 1:
            raise ValueError(
                f"backward_passes_per_step={self.distribution.settings.passes} doesn't go together with a "
                "LossScaleOptimizer of tf_keras. Use Keras 3, the policy 'mixed_bfloat16', or one pass a step."
            )
        reduced = self.distribution.reduce([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return [(grad, variable) for grad, (_, variable) in zip(reduced, pairs, strict=True)]

    def _after_passes(self: Any, update: Any, grads_and_vars: Any) -> Any:
        """Add the gradients up, and `update(pairs)` in the last of the passes; the iterations so far."""
        import tensorflow as tf

        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            # Now: within a branch of a graph no variable can be made.
            self._create_variables(variables)

        def step(sums: list[Any]) -> Any:
            reduced = self.distribution.reduce(sums, variables)
            return update(list(zip(reduced, variables, strict=True)))

        accumulator_of(self, variables).step([grad for grad, _ in pairs], variables, step)
        return self.iterations


class DistributedKeras2(_DistributedKeras2):
    """Put before an optimizer of tf_keras."""

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return super().aggregate_gradients(self._reduced(grads_and_vars))  # type: ignore[misc]

    def apply_gradients(
        self: Any, grads_and_vars: Any, name: str | None = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Update the variables by the ranks' reduced gradients. skip_gradients_aggregation: they are reduced already."""
        skip = skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True)
        update = super().apply_gradients  # type: ignore[misc]
        if skip or self.distribution.settings.passes == 1:
            return update(grads_and_vars, name=name, skip_gradients_aggregation=skip, **kwargs)
        return self._after_passes(
            lambda pairs: update(pairs, name=name, skip_gradients_aggregation=True, **kwargs), grads_and_vars
        )

    def _create_variables(self: Any, variables: list[Any]) -> None:
        self.build(variables)


class DistributedLegacy(_DistributedKeras2):
    """Put before an optimizer of `tf_keras.optimizers.legacy`."""

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return super()._aggregate_gradients(self._reduced(grads_and_vars))  # type: ignore[misc]

    def apply_gradients(
        self: Any, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """Update the variables by the ranks' reduced gradients, unless they are reduced already."""
        update = super().apply_gradients  # type: ignore[misc]
        if not experimental_aggregate_gradients or self.distribution.settings.passes == 1:
            return update(grads_and_vars, name=name, experimental_aggregate_gradients=experimental_aggregate_gradients)
        return self._after_passes(
            lambda pairs: update(pairs, name=name, experimental_aggregate_gradients=False), grads_and_vars
        )

    def _create_variables(self: Any, variables: list[Any]) -> None:
        self._create_all_weights(variables)
