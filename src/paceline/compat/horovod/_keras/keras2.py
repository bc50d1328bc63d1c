"""The mixins that DistributedOptimizer puts before an optimizer class of tf_keras or `optimizers.legacy`.

    minimize            computes gradients, and applies them
    compute_gradients   returns reduced gradients, as in Horovod, so that a script can clip them
    apply_gradients     reduces gradients from elsewhere (tape.gradient), before Keras clips them

`apply_gradients` skips gradients that `compute_gradients` has reduced already, in eager execution or in the same graph.
A LossScaleOptimizer around the optimizer calls the same methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from paceline.compat.horovod._keras.reducing import Accumulator, Distribution, accumulator_of
from paceline.compat.horovod._keras.settings import key_of
from paceline.compat.horovod.common.types import OptimizerOfKeras2

if TYPE_CHECKING:
    from types import ModuleType

    import tensorflow as tf

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
Pair: TypeAlias = "tuple[Gradient, tf.Variable]"


class _DistributedKeras2(OptimizerOfKeras2):
    distribution: ClassVar[Distribution]

    def register_local_var(self, variable: tf.Variable) -> None:
        """Exclude this variable's gradient from the reduction over ranks."""
        self.distribution.settings.local_variables.add(key_of(variable))

    @property
    def _agg_helper(self) -> Accumulator | None:
        """The accumulator of several passes' gradients, or None for a single pass."""
        if self.distribution.settings.passes == 1:
            return None
        kept = vars(self).get("_accumulators")
        # Before the first step, return a new accumulator, because scripts only read its settings.
        return next(iter(kept.values())) if kept else self.distribution.accumulator()

    def _allreduce(self, grads: Iterable[Gradient], vars: Iterable[tf.Variable]) -> list[Gradient]:
        """Reduce gradients, and mark them so that `apply_gradients` does not reduce them again."""
        reduced = self.distribution.reduce(list(grads), list(vars))
        self._mark("_reduced_in")
        return reduced

    def _computed(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        """Return (gradient, variable) pairs, reduced unless several passes are accumulated first."""
        pairs = list(grads_and_vars)
        if self.distribution.settings.passes > 1:
            # Let `apply_gradients` sum and reduce these gradients, even if its caller says that they are reduced.
            self._mark("_to_reduce_in")
            return pairs
        if not pairs:
            return pairs
        grads, variables = zip(*pairs, strict=True)
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    def _reduced(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        pairs = list(grads_and_vars)
        if self._were_reduced():
            return pairs
        if self.distribution.settings.passes > 1:
            raise ValueError(
                f"backward_passes_per_step={self.distribution.settings.passes} doesn't go together with a "
                "LossScaleOptimizer of tf_keras. Use Keras 3, the policy 'mixed_bfloat16', or one pass a step."
            )
        reduced = self.distribution.reduce([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return [(grad, variable) for grad, (_, variable) in zip(reduced, pairs, strict=True)]

    def _mark(self, name: str) -> None:
        # Bypass __setattr__, because Keras would track the attribute.
        vars(self)[name] = weakref.ref(_graph())

    def _is_marked(self, name: str) -> bool:
        """Remove the optimizer's mark `name`. Return whether it was set in this graph."""
        place = vars(self).pop(name, None)
        return place is not None and place() is _graph()

    def _were_reduced(self) -> bool:
        return self._is_marked("_reduced_in")

    def _applies_as_is(self, skip: bool) -> bool:
        """Return whether to apply gradients now, not to accumulate them. `skip`: they are reduced."""
        # Ignore `skip` for gradients that are marked as not reduced: they belong to only one of several passes.
        to_reduce = self._is_marked("_to_reduce_in")
        return self.distribution.settings.passes == 1 or (skip and not to_reduce)

    def _create_variables(self, variables: list[tf.Variable]) -> None:
        raise NotImplementedError

    def _after_passes(self, update: Callable[[list[Pair]], object], grads_and_vars: Iterable[Pair]) -> tf.Variable:
        """Accumulate gradients. In the last pass call `update` with the reduced sums. Return `self.iterations`."""
        import tensorflow as tf

        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            self._create_variables(variables)

        def step(sums: list[Gradient]) -> object:
            reduced = self.distribution.reduce(sums, variables)
            return update(list(zip(reduced, variables, strict=True)))

        accumulator_of(self, variables).step([grad for grad, _ in pairs], variables, step)
        return self.iterations


class DistributedKeras2(_DistributedKeras2):
    """A mixin that reduces gradients, for optimizer classes of tf_keras."""

    def compute_gradients(self, loss: object, var_list: object, tape: tf.GradientTape | None = None) -> list[Pair]:
        """Return (gradient, variable) pairs, reduced over the ranks."""
        return self._computed(super().compute_gradients(loss, var_list, tape))

    def _compute_gradients(
        self, loss: object, var_list: object, grad_loss: object = None, tape: tf.GradientTape | None = None
    ) -> list[Pair]:
        return self.compute_gradients(loss, var_list, tape)

    def aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> object:
        return super().aggregate_gradients(self._reduced(grads_and_vars))

    def _aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> object:
        return self.aggregate_gradients(grads_and_vars)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Pair],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: object,
    ) -> object:
        """Reduce the gradients and update the variables.

        `skip_gradients_aggregation=True` applies gradients that the caller has reduced already.
        """
        # Also accept `experimental_aggregate_gradients`, the argument's earlier name, which has the opposite meaning.
        skip = skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True)
        if skip:
            # Remove the mark "reduced" now. It belongs to these gradients, and not to those of the next step.
            self._were_reduced()
        update = super().apply_gradients
        if self._applies_as_is(skip):
            return update(grads_and_vars, name=name, skip_gradients_aggregation=skip, **kwargs)
        return self._after_passes(
            lambda pairs: update(pairs, name=name, skip_gradients_aggregation=True, **kwargs), grads_and_vars
        )

    def _create_variables(self, variables: list[tf.Variable]) -> None:
        self.build(variables)


class DistributedLegacy(_DistributedKeras2):
    """A mixin that reduces gradients, for classes of `tf_keras.optimizers.legacy`."""

    def compute_gradients(self, loss: object, var_list: object, tape: tf.GradientTape | None = None) -> list[Pair]:
        """Return (gradient, variable) pairs, reduced over the ranks."""
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: object, var_list: object, grad_loss: object = None, tape: tf.GradientTape | None = None
    ) -> list[Pair]:
        return self._computed(super()._compute_gradients(loss, var_list, grad_loss, tape))

    def get_gradients(self, loss: object, params: list[tf.Variable]) -> list[Gradient]:
        """Return reduced gradients in a TensorFlow 1 graph."""
        grads = list(super().get_gradients(loss, params))
        return grads if self.distribution.settings.passes > 1 else self._allreduce(grads, params)

    def _aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> object:
        return super()._aggregate_gradients(self._reduced(grads_and_vars))

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> object:
        """Update the variables by the ranks' reduced gradients."""
        update = super().apply_gradients
        if not experimental_aggregate_gradients:
            self._were_reduced()
        if self._applies_as_is(not experimental_aggregate_gradients):
            return update(grads_and_vars, name=name, experimental_aggregate_gradients=experimental_aggregate_gradients)
        return self._after_passes(
            lambda pairs: update(pairs, name=name, experimental_aggregate_gradients=False), grads_and_vars
        )

    def _create_variables(self, variables: list[tf.Variable]) -> None:
        self._create_all_weights(variables)


def _graph() -> tf.Graph | ModuleType:
    """Return the graph under construction, or the module tensorflow in eager execution."""
    import tensorflow as tf
    from tensorflow.python.framework import ops

    return tf if tf.executing_eagerly() else ops.get_default_graph()
