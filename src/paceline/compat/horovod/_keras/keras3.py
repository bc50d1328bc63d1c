"""The class by which DistributedOptimizer extends an optimizer of Keras 3, whose every update goes through `apply`."""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.compat.horovod._keras.reducing import Distribution, accumulator_of
from paceline.compat.horovod._keras.settings import key_of


class DistributedKeras3:
    """Put before an optimizer's own class; `distribution` is a class attribute of what comes of it.

    Clipping, weight decay, moving averages and the update itself are the optimizer's own, after the reduction.
    """

    distribution: ClassVar[Distribution]

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables by the ranks' reduced gradients; with several passes a step, in the last of them."""
        # A list, for `zip` gives what can be read only once.
        update, grads = super().apply, list(grads)  # type: ignore[misc]
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables is not None and len(variables) != len(grads):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables: give one for each.")
        known = self._trainable_variables if variables is None and self.built else variables
        if known is None or len(known) != len(grads) or self.gradient_accumulation_steps:
            # With Keras's own accumulation, `_clip_gradients` reduces; what is wrong here, Keras says itself.
            update(grads, variables)
        elif self.distribution.settings.passes > 1:
            self._apply_after_passes(update, grads, known)
        else:
            update(self.distribution.reduce(grads, known), variables)

    def register_local_var(self, variable: Any) -> None:
        """Let the gradient of this variable stay on its rank."""
        self.distribution.settings.local_variables.add(key_of(variable))

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        # Past __setattr__, which would have Keras track them.
        self.__dict__["_being_applied"] = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self: Any, grads: Any) -> Any:
        # Called once a step, with Keras's accumulation in the last pass alone: so only its sums are sent.
        if self.gradient_accumulation_steps:
            grads = self.distribution.reduce(list(grads), self.__dict__["_being_applied"])
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _apply_after_passes(self: Any, update: Any, grads: list[Any], variables: list[Any]) -> None:
        if not self.built:
            from keras.src import backend

            # Now: within a branch of a graph no variable can be made.
            with backend.name_scope(self.name, caller=self):
                self.build(variables)

        def step(sums: list[Any]) -> None:
            update(self.distribution.reduce(sums, variables), variables)

        accumulator_of(self, variables).step(grads, variables, step)
