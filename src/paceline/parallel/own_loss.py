"""The loss that a model computes by itself, from labels among its arguments (`loss=None`). Loaded on use: it imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.parallel.batches.batch import TARGETS, Parts
from paceline.parallel.errors import ParallelError


def own_loss(output: Any, target: Any) -> Tensor:
    """The loss in what a model has returned: a number (0-dim), "loss" of a dict, `.loss`, or the first of a tuple.

    Raises:
        ParallelError: there is none.
    """
    if isinstance(output, Tensor):
        found: Any = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    else:
        found = output[0] if isinstance(output, (tuple, list)) and output else None
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    what = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ParallelError(
        f"loss=None takes the model's own loss, and the model returned {what} without one: a number (a 0-dim tensor), a dict or "
        'an object with "loss", or a tuple that begins with it. Are the labels in the batch? Or give a loss of (output, target).'
    )


def own_split(model: nn.Module) -> Callable[[Any], Parts]:
    """A function from a batch to its parts: the model gets all of it, labels too. What `loss_weight` gets are the labels."""
    takes = inspect.signature(model.forward)

    def split(batch: Any) -> Parts:
        if isinstance(batch, Mapping):
            found = [name for name in TARGETS if name in batch]
            parts = Parts((), dict(batch), batch[found[0]] if len(found) == 1 else dict(batch))
        elif isinstance(batch, (tuple, list)):
            parts = Parts(tuple(batch), {}, batch[-1] if batch else None)
        else:
            parts = Parts((batch,), {}, batch)
        try:
            takes.bind(*parts.args, **parts.kwargs)
        except TypeError as error:
            raise ParallelError(
                f"loss=None gives the whole batch to the model, labels too, which {type(model).__name__}.forward can't take "
                f"({error}). Give a loss, a function of (output, target), or say what the model takes: "
                "split=lambda batch: Parts(args, kwargs, target)."
            ) from error
        return parts

    return split
