"""Protocols of the frameworks' objects, for modules that load no framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict

from paceline.collectives.numbers import Array

if TYPE_CHECKING:
    from mpi4py import MPI

#: Ranks as a list, or an mpi4py communicator.
RanksOrComm: TypeAlias = "Iterable[int] | MPI.Comm"


class Variable(Protocol):
    """A variable of TensorFlow or Keras."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Iterable[int]: ...

    @property
    def dtype(self) -> object: ...

    def numpy(self) -> Array: ...

    def assign(self, value: object) -> object: ...


class Layer(Protocol):
    """A layer of Keras."""

    @property
    def trainable_variables(self) -> Sequence[Variable]: ...

    @property
    def trainable_weights(self) -> Sequence[Variable]: ...


class LossScaled(Protocol):
    """An optimizer with another optimizer within it."""

    @property
    def inner_optimizer(self) -> Optimizer: ...


class Optimizer(Protocol):
    """An optimizer of Keras. Its further attributes differ between releases."""

    learning_rate: object
    built: bool

    def build(self, variables: Sequence[Variable]) -> None: ...


class Model(Protocol):
    """A model of Keras."""

    @property
    def name(self) -> str: ...

    @property
    def built(self) -> bool: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def weights(self) -> Sequence[Variable]: ...

    @property
    def trainable_variables(self) -> Sequence[Variable]: ...


#: Layers whose gradients stay on their rank: one or several.
Layers: TypeAlias = "Layer | Iterable[Layer] | None"
#: The number of groups of gradients, or the variables of each.
Groups: TypeAlias = "int | Sequence[Sequence[object]] | None"


class KeptState(TypedDict, total=False):
    """The saved values of an elastic state: plain values, variables, and the values of handlers."""

    values: dict[str, object]
    variables: list[Array]
    handlers: dict[str, object]
