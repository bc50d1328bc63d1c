"""What is asked of a model that is served as it is: tensors in, tensors out, each with a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class TensorInfo(NamedTuple):
    """A tensor that a model takes or returns. datatype: of the Open Inference Protocol; shape: -1 for any size, None where the
    number of dimensions is not known.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None


class Runner(Protocol):
    """platform: as the inference protocol names it. outputs: all that may be asked for, `default` those that are given where
    nothing is. batches: rows of several requests may be given together, along the first dimension.
    """

    platform: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    default: list[str]
    batches: bool

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> dict[str, Any]:
        """The outputs of these names.

        Raises:
            InputError: the model can't take these inputs.
        """
        ...


def blamed(reason: Exception) -> str | None:
    """The first line of an error of a library, where the input may be to blame; None where it is memory or a device."""
    text = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return None if any(word in text.lower() for word in ("memory", "cuda", "device-side")) else text[:300]
