"""`hvd.elastic`: training that continues after a failed collective."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common.elastic import VariablesState, run
from paceline.compat.horovod.tensorflow.functions import broadcast_object, broadcast_variables
from paceline.compat.horovod.tensorflow.names import raw

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]  # noqa: F822 - made on use


class TensorFlowState(VariablesState):
    """An elastic training state: TensorFlow variables, and plain values as attributes.

    `variables` defaults to all global variables of a TensorFlow 1 graph; `session` is a session of this graph. `kwargs`
    are plain values, such as `batch=0`, which commits keep without copying.
    """

    def __init__(
        self,
        variables: Iterable[tf.Variable] | None = None,
        session: tf.compat.v1.Session | None = None,
        **kwargs: object,
    ) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        self._assigns: list[tuple[tf.Tensor, tf.Operation]] | None = None
        super().__init__(**kwargs)

    def _spread(self) -> None:
        if self.session is None:
            broadcast_variables(self.variables, root_rank=0)
        # If there is a session, only the session can read the variables. Broadcast their values as a pickled object.
        else:
            self._write(broadcast_object(self._read(), name="elastic_variables"))

    def _read(self) -> list[Array]:
        if self.session is not None:
            return list(self.session.run(self.variables))
        return [np.array(raw(variable).numpy()) for variable in self.variables]

    def _write(self, values: list[Array]) -> None:
        if self.session is None:
            for variable, value in zip(self.variables, values, strict=True):
                raw(variable).assign(value)
            return
        if self._assigns is None:
            # Create these operations only once, because a graph keeps all operations.
            with self.session.graph.as_default():
                self._assigns = [
                    (place, tf.compat.v1.assign(variable, place))
                    for variable in self.variables
                    for place in [tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)]
                ]
        fed = {place: value for (place, _), value in zip(self._assigns, values, strict=True)}
        self.session.run([assign for _, assign in self._assigns], fed)


def __getattr__(name: str) -> object:
    if name == "TensorFlowKerasState":
        from paceline.compat.horovod._keras.elastic import KerasState

        return KerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
