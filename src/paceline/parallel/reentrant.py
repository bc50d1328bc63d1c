"""Reentrant checkpoints of torch's, where they are in the way. Loaded on use: it imports torch.

`torch.utils.checkpoint.checkpoint(use_reentrant=True)` is a custom autograd function: what it runs is not in the graph, and
torch.autograd.grad refuses it. It gives the same numbers as the calls within it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.checkpoint import CheckpointFunction


@contextlib.contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Within the block reentrant checkpoints keep what they compute, as if the function in them were called alone."""

    def apply(kind: Any, function: Callable[..., Any], keeps_random: bool, *args: Any) -> Any:
        return function(*args)

    CheckpointFunction.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        # What is left is the one of its base class.
        del CheckpointFunction.apply
