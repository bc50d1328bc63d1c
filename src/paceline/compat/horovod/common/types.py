"""Protocols of the frameworks' objects, for modules that load no framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

from paceline.collectives.numbers import Array

if TYPE_CHECKING:
    from mpi4py import MPI

#: Ranks as a list, or an mpi4py communicator.
RanksOrComm: TypeAlias = "Iterable[int] | MPI.Comm"


class Variable(Protocol):
    """A variable of TensorFlow or Keras."""

    name: str
    shape: Iterable[int]
    dtype: object

    def numpy(self) -> Array: ...
    def assign(self, value: object) -> object: ...
    def __mul__(self, factor: float, /) -> object: ...


class KerasLayer(Protocol):
    """A layer of Keras."""

    trainable_variables: Sequence[Variable]
    trainable_weights: Sequence[Variable]


class Optimizer(Protocol):
    """The attributes of a Keras optimizer that are the same in all releases."""

    learning_rate: object
    built: bool
    #: The optimizer's variables: a list in Keras 3, but in older versions a method that returns a list.
    variables: Any

    def build(self, variables: Sequence[Variable]) -> None: ...


class KerasModel(Protocol):
    """A model of Keras."""

    name: str
    built: bool
    optimizer: Optimizer
    weights: Sequence[Variable]
    trainable_variables: Sequence[Variable]


#: One or more layers whose gradients are not reduced.
Layers: TypeAlias = "KerasLayer | Iterable[KerasLayer] | None"
#: Number of groups of gradients, or a list of variables for each group.
Groups: TypeAlias = "int | Sequence[Sequence[object]] | None"


if TYPE_CHECKING:

    class OptimizerOfKeras3:
        """The methods of Keras 3 that a distributed optimizer extends."""

        name: str
        built: bool
        gradient_accumulation_steps: int | None
        _trainable_variables: list[Variable]

        def build(self, variables: Sequence[Variable]) -> None: ...
        def apply(self, grads: Any, trainable_variables: Any = None) -> None: ...
        def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None: ...
        def _clip_gradients(self, grads: Any) -> list[object]: ...

    class OptimizerOfKeras2:
        """The methods of tf_keras that a distributed optimizer extends."""

        iterations: Any

        def build(self, variables: Any) -> None: ...
        def _create_all_weights(self, variables: Any) -> None: ...
        def compute_gradients(self, loss: object, var_list: object, tape: Any = None) -> Any: ...
        def _compute_gradients(
            self, loss: object, var_list: object, grad_loss: object = None, tape: Any = None
        ) -> Any: ...
        def get_gradients(self, loss: object, params: Any) -> Any: ...
        def aggregate_gradients(self, grads_and_vars: Any) -> object: ...
        def _aggregate_gradients(self, grads_and_vars: Any) -> object: ...
        def apply_gradients(self, *args: Any, **kwargs: Any) -> object: ...

else:
    OptimizerOfKeras3 = OptimizerOfKeras2 = object


class KeptState(TypedDict, total=False):
    """An elastic state's saved content. `handlers` has models, optimizers and samplers."""

    values: dict[str, object]
    variables: list[Array]
    handlers: dict[str, object]
