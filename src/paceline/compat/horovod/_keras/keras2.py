"""The classes by which DistributedOptimizer extends an optimizer of tf_keras, of the present kind or of `optimizers.legacy`.

    minimize          computes gradients, and applies them
    computing         gives them reduced, as in Horovod, so that a script can clip them
    apply_gradients   reduces those that come from elsewhere (tape.gradient), before Keras clips them

What was computed is not reduced again by the next `apply_gradients` of the same graph, or of eager execution. A
LossScaleOptimizer around the optimizer calls the same methods.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from paceline.compat.horovod._keras.reducing import Distribution, accumulator_of
from paceline.compat.horovod._keras.settings import key_of


class _DistributedKeras2:
    distribution: ClassVar[Distribution]

    def register_local_var(self, variable: Any) -> None:
        """Let the gradient of this variable stay on its rank."""
        self.distribution.settings.local_variables.add(key_of(variable))

    @property
    def _agg_helper(self) -> Any:
        """The adder of several backward passes' gradients; None with one pass a step. Scripts ask whether there is one."""
        if self.distribution.settings.passes == 1:
            return None
        kept = vars(self).get("_accumulators")
        # Before the first step there is none. Scripts only read the settings of the one that they are given.
        return next(iter(kept.values())) if kept else self.distribution.accumulator()

    def _allreduce(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients reduced; what comes next is applied as it is."""
        reduced = self.distribution.reduce(list(grads), list(vars))
        self._mark("_reduced_in")
        return reduced

    def _computed(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """The gradients for a script that has them computed: reduced, unless several passes are added up first."""
        pairs = list(grads_and_vars)
        if self.distribution.settings.passes > 1:
            # They are added up and reduced when they are applied, whatever that call says of reducing.
            self._mark("_to_reduce_in")
            return pairs
        if not pairs:
            return pairs
        grads, variables = zip(*pairs, strict=True)
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    def _reduced(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
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
        # Past __setattr__, which would have Keras track it.
        vars(self)[name] = weakref.ref(_graph())

    def _is_marked(self, name: str) -> bool:
        """Return whether gradients of this graph were given out under this mark, and take the mark away."""
        place = vars(self).pop(name, None)
        return place is not None and place() is _graph()

    def _were_reduced(self) -> bool:
        """Return whether gradients of this graph were reduced when they were computed. Asked once for each time."""
        return self._is_marked("_reduced_in")

    def _applies_as_is(self, skip: bool) -> bool:
        """Return whether the gradients are applied as they are: the script has reduced them, or there is one pass a step.

        skip: The call says that they are reduced. Those that this optimizer has computed for one of several passes are not.
        """
        to_reduce = self._is_marked("_to_reduce_in")
        return self.distribution.settings.passes == 1 or (skip and not to_reduce)

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

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs, reduced over the ranks."""
        return self._computed(super().compute_gradients(loss, var_list, tape))  # type: ignore[misc]

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        return self.compute_gradients(loss, var_list, tape)

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return super().aggregate_gradients(self._reduced(grads_and_vars))  # type: ignore[misc]

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return self.aggregate_gradients(grads_and_vars)

    def apply_gradients(
        self: Any, grads_and_vars: Any, name: str | None = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Update the variables by the ranks' reduced gradients. skip_gradients_aggregation: they are reduced already."""
        # `experimental_aggregate_gradients` is the older name of the argument, with the opposite meaning.
        skip = skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True)
        if skip:
            # For its effect: the mark is for the gradients that are applied now, and must not count for the next ones.
            self._were_reduced()
        update = super().apply_gradients  # type: ignore[misc]
        if self._applies_as_is(skip):
            return update(grads_and_vars, name=name, skip_gradients_aggregation=skip, **kwargs)
        return self._after_passes(
            lambda pairs: update(pairs, name=name, skip_gradients_aggregation=True, **kwargs), grads_and_vars
        )

    def _create_variables(self: Any, variables: list[Any]) -> None:
        self.build(variables)


class DistributedLegacy(_DistributedKeras2):
    """Put before an optimizer of `tf_keras.optimizers.legacy`."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs, reduced over the ranks."""
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        return self._computed(super()._compute_gradients(loss, var_list, grad_loss, tape))  # type: ignore[misc]

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The gradients of the variables in a graph of TensorFlow 1, reduced over the ranks."""
        grads = list(super().get_gradients(loss, params))  # type: ignore[misc]
        return grads if self.distribution.settings.passes > 1 else self._allreduce(grads, params)

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return super()._aggregate_gradients(self._reduced(grads_and_vars))  # type: ignore[misc]

    def apply_gradients(
        self: Any, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """Update the variables by the ranks' reduced gradients, unless they are reduced already."""
        update = super().apply_gradients  # type: ignore[misc]
        if not experimental_aggregate_gradients:
            self._were_reduced()
        if self._applies_as_is(not experimental_aggregate_gradients):
            return update(grads_and_vars, name=name, experimental_aggregate_gradients=experimental_aggregate_gradients)
        return self._after_passes(
            lambda pairs: update(pairs, name=name, experimental_aggregate_gradients=False), grads_and_vars
        )

    def _create_variables(self: Any, variables: list[Any]) -> None:
        self._create_all_weights(variables)


def _graph() -> Any:
    """The graph that is being made, or what stands for eager execution."""
    import tensorflow as tf
    from tensorflow.python.framework import ops

    return tf if tf.executing_eagerly() else ops.get_default_graph()
