"""`hvd.elastic`: training that goes on after a failed collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.compat.horovod.common.basics import init, shutdown
from paceline.compat.horovod.common.elastic import run_fn
from paceline.compat.horovod.torch.elastic.sampler import ElasticSampler
from paceline.compat.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorator: `func(state, ...)` starts from the first rank's state, and begins again at the last commit where a
    collective has failed. The engine is started anew each time."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
