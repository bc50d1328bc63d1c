"""What each of a trial's two workers does, on both sides: a model of eight numbers, trained by averaged gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

STEPS = 20


def losses(lr: float) -> list[float]:
    """The loss after each step. The process group is there."""
    torch.manual_seed(dist.get_rank())
    weights, wanted = torch.zeros(8), torch.arange(8.0)
    found = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 8)
        error = inputs @ (weights - wanted)
        gradient = inputs.T @ error / 64
        dist.all_reduce(gradient)
        weights -= lr * gradient / dist.get_world_size()
        found.append(float(error.square().mean()))
    return found
