"""Batch normalization over the batches of all ranks, on CPU and GPU."""

from __future__ import annotations

from typing import Any

import torch

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.ops import Sum
from paceline.compat.horovod.torch.allreduce import allreduce
from paceline.compat.horovod.torch.arrays import differentiable
from paceline.compat.horovod.torch.gather import allgather
from paceline.torch_private import BatchNorm


class SyncBatchNorm(BatchNorm):
    """Batch normalization that uses all ranks' batches while training.

    The input's shape is [N, C, *]. The ranks' batches may have different sizes and may be empty. In evaluation, and
    with one rank, the layer works like torch's batch normalization.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (N, C, *), got {input.dim()}: shape {list(input.shape)}.")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (num_features), got shape {list(input.shape)}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training or basics.size() == 1:
            return super().forward(input)
        output, mean, variance, count = differentiable(_Normalise, input, self.weight, self.bias, self.eps)
        if self.running_mean is not None and self.running_var is not None:
            self._follow(mean, variance, int(count))
        return output  # type: ignore[no-any-return]

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """Move the running statistics towards this batch's mean and variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        assert factor is not None
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        # Compute in float32, because sums over a batch would lose too much precision in float16.
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        channels = x.shape[1]
        own_count = x.numel() // channels
        # Use 0 for an empty batch: its mean would be nan, and the exchange below would spread the nan to all ranks.
        own_mean = wide.mean(axes) if own_count else wide.new_zeros(channels)
        own_square = (wide - _shaped(own_mean, x)).square().sum(axes)
        # Exchange means and squared distances, not sums of squares, which lose precision for a large mean
        # (Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).
        # Use float64 for the counts: a batch may have more than 2**24 pixels, the largest count that float32 has exactly.
        own = torch.cat([own_mean.double(), own_square.double(), own_mean.new_tensor([own_count]).double()])
        every = allgather(own.unsqueeze(0))
        means, squares, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
        count = counts.sum()
        if count == 0:
            raise ValueError("SyncBatchNorm: the batches of all ranks are empty.")
        mean = (means * counts).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _shaped(mean.to(wide.dtype), x)) * _shaped(scale.to(wide.dtype), x)
        ctx.save_for_backward(normal, weight, bias, scale.to(wide.dtype), count)
        ctx.axes = axes
        output = normal if weight is None else normal * _shaped(weight.to(wide.dtype), x)
        output = output if bias is None else output + _shaped(bias.to(wide.dtype), x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        normal, weight, bias, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        channels = normal.shape[1]
        grad_bias, grad_weight = grad.sum(ctx.axes), (grad * normal).sum(ctx.axes)
        summed = allreduce(torch.cat([grad_bias, grad_weight]), op=Sum)
        mean_grad, mean_along = (_shaped(part / count.to(part.dtype), normal) for part in torch.split(summed, channels))
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        grad_x = (grad - mean_grad - normal * mean_along) * _shaped(factor, normal)
        # Return this rank's own gradients of weight and bias: the optimizer averages them, like all gradients.
        pairs = (weight, grad_weight), (bias, grad_bias)
        return grad_x.to(grads[0].dtype), *(None if p is None else own.to(p.dtype) for p, own in pairs), None


def _shaped(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape values by channel from [C] to [1, C, 1, ...]."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))
