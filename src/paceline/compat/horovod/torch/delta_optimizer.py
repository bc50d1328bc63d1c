"""DistributedOptimizer with op=Adasum: each rank takes its own step, and the steps are combined, not the gradients.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Adasum
from paceline.compat.horovod.torch.allreduce import allreduce_async_
from paceline.compat.horovod.torch.gradient_optimizer import GradientOptimizer


class AdasumOptimizer(GradientOptimizer):
    """The part of a DistributedOptimizer with Adasum that comes before the wrapped optimizer's class."""

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for before `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raise: with Adasum nothing is reduced before the step, so nothing can be skipped."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step, from whose place the ranks' steps are combined; the closure's loss."""
        self._follow_parameters()
        trained = self._trained
        # Copies, for the step overwrites the parameters, and what is sent is the difference.
        start = [p.detach().clone() for p in trained]
        compression = self._reduction.compression
        try:
            # Past GradientOptimizer's own `step`, which would reduce gradients.
            loss = super(GradientOptimizer, self).step(closure)  # type: ignore[misc]
            under_way = []
            for p, before in zip(trained, start, strict=True):
                delta, ctx = compression.compress(p.detach() - before)
                under_way.append((allreduce_async_(delta, name=f"delta.{self._parameter_names[p]}", op=Adasum), ctx))
            for p, before, (handle, ctx) in zip(trained, start, under_way, strict=True):
                with torch.no_grad():
                    # From where the step began, by what all ranks have made of their steps: so the parameters stay equal.
                    p.copy_(before + compression.decompress(handles.synchronize(handle), ctx))
        finally:
            self._forget()
        return loss

    def _submit(self, p: torch.Tensor) -> None:
        """Count the backward passes; nothing is sent during them."""
