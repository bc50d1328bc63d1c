"""The interface of runners, which map named input tensors to named output tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
#: Name of an output -> array, tensor or list, as the framework returns it.
Outputs: TypeAlias = "dict[str, Any]"


class TensorInfo(NamedTuple):
    """The name, type and shape of an input or output of a model.

    datatype: A name of the Open Inference Protocol, such as "FP32".
    shape: The sizes, with -1 for any size; None if the number of dimensions is unknown.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None


class Runner(Protocol):
    """A loaded model that maps named input tensors to named output tensors.

    platform: Name of the framework in the Open Inference Protocol.
    default: Names of the outputs in the response to a request that selects no outputs.
    batches: Whether the rows of several requests may be concatenated along the first dimension.
    """

    platform: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    default: list[str]
    batches: bool

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Outputs:
        """Run the model, and return its outputs with the names in `wanted`.

        Raises:
            InputError: The model does not accept inputs of these types, shapes or values.
        """
        ...


def blamed(reason: Exception) -> str | None:
    """Return an error's first line if the request may have caused it."""
    text = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return None if any(word in text.lower() for word in ("memory", "cuda", "device-side")) else text[:300]
