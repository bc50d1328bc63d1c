"""A model that `parallelize` has taken over, and what is said where its owner goes on as if it had not. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.failure.watch import is_communication


class Kept:
    """The types and devices that parameters had when they were taken over."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = dict(params)
        self._before = {name: _kind(param) for name, param in self._params.items()}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An error within the block that comes from the model's having been converted or moved since is told as that.

        Raises:
            ParallelError: in place of such an error, with a parameter's name.
        """
        try:
            yield
        except ParallelError:
            raise
        except Exception as error:
            if is_communication(error):
                raise  # another rank has it at first hand
            for name, param in self._params.items():
                if _kind(param) != self._before[name]:
                    raise ParallelError(
                        f"{name} was {self._before[name]} when parallelize took the model over, and is {_kind(param)} now. "
                        "Convert or move the model first (model.to(...), .double(), .half()), then make the optimizer, then "
                        f"call parallelize. torch says: {error}"
                    ) from error
            raise


def refuse_calls(model: nn.Module) -> None:
    """Let a call of the user's own model, of which this rank holds a part alone, say so."""

    def refuse(*_: Any) -> None:
        raise ParallelError(
            f"{type(model).__name__} was called, but it is cut into stages, and this rank has only its own. Train with "
            "par.step(batch), get numbers with par.evaluate(loader, metric), and par.full_state_dict() for a plain model "
            "to call."
        )

    model.register_forward_pre_hook(refuse)


def _kind(param: nn.Parameter) -> str:
    return f"{str(param.dtype).removeprefix('torch.')} on {param.device}"
