"""Batch normalisation over the batch of all replicas, so that a step equals a step in one process.

torch's SyncBatchNorm supports only GPUs. In Paceline, the model's BatchNorm modules stay the same objects, with their
parameters, buffers and hooks. Only their class changes, to a subclass with another `forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.class_swap import SharedByCopies, apply_function
from paceline.parallel.errors import ParallelError
from paceline.torch_private import BatchNorm, InstanceNorm

#: Whether this rank's current rows count (instead of being padding), and whether any replica has rows that count. Global
#: variables suffice, because a process computes one microbatch at a time.
_counts = True
_somewhere = True


def synchronise(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make the module's BatchNorm layers normalise over the batches of all replicas.

    Without a `group` the layers only ignore padding. A layer of a user's subclass is left unchanged.
    """
    for part in module.modules():
        if (kind := _SYNCHRONISED.get(type(part))) is not None:
            # Write to the module's `__dict__`, so that state dicts do not contain the process group.
            part.__dict__["_paceline_group"] = None if group is None else _Shared(group)
            # Change only the class: the module stays the same object, to which the user's code may refer.
            part.__class__ = kind


def regroup(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let the layers that communicate use another process group of the same ranks."""
    for part in module.modules():
        shared = part.__dict__.get("_paceline_group")
        if isinstance(shared, _Shared) and shared.group is not None:
            shared.group = group


@contextlib.contextmanager
def alone(module: nn.Module) -> Iterator[None]:
    """Within the block, stop normalisation layers from communicating with other ranks."""
    groups = [(part, part.__dict__.get("_paceline_group")) for part in module.modules()]
    changed = [(part, group) for part, group in groups if group is not None]
    for part, _ in changed:
        part.__dict__["_paceline_group"] = _Shared(None)
    try:
        yield
    finally:
        for part, group in changed:
            part.__dict__["_paceline_group"] = group


@contextlib.contextmanager
def counting(micro: Microbatch) -> Iterator[None]:
    """Within the block, exclude the microbatch from statistics if it is padding."""
    with _counting_as(micro.rows > 0, micro.global_rows > 0):
        yield


def counting_as_now() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that later restores the present treatment of padding."""
    return _counting_as(_counts, _somewhere)


@contextlib.contextmanager
def _counting_as(counts: bool, somewhere: bool) -> Iterator[None]:
    global _counts, _somewhere
    before = _counts, _somewhere
    _counts, _somewhere = counts, somewhere
    try:
        yield
    finally:
        _counts, _somewhere = before


class _Shared(SharedByCopies):
    """A holder of a process group. Copies share the group; pickles omit it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return _Shared, (None,)


class _Synchronised(BatchNorm):
    """torch's BatchNorm, which in training uses the statistics of all ranks' batches."""

    _paceline_group: _Shared | None

    def forward(self, input: Tensor) -> Tensor:
        shared = self._paceline_group
        group = None if shared is None else shared.group
        uses_batch = self.training or self.running_mean is None
        if uses_batch and shared is not None and group is None and input.numel() == input.shape[1]:
            # Within the context `alone`, as in a measurement, each replica normalises only its own rows, and a single row has no
            # variance. This is no error, because in training the row is normalised together with the other replicas' rows.
            return _without_statistics(self, input)
        if not uses_batch or (group is None and _counts):
            if uses_batch and input.dim() > 1 and input.numel() == input.shape[1]:
                kind = type(self).__name__.removeprefix("Synchronised")
                raise ParallelError(
                    f"a microbatch gives {kind} one value for each of its {input.shape[1]} channels, which has no variance. "
                    "Give batches of at least two rows for each microbatch: a larger batch_size, fewer microbatches, "
                    "drop_last=True; or normalise within a row (GroupNorm, LayerNorm)."
                )
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not _somewhere or (group is None and not _counts):
            # All rows are padding. Compute a result that is not used, because each rank must build the same graph.
            return _without_statistics(self, input)
        outputs: tuple[Tensor, ...] = apply_function(
            _Normalise, input, self.weight, self.bias, self.eps, group, _counts
        )
        output, mean, variance, count = outputs
        if self.training and self.track_running_stats:
            self._follow(mean, variance, count)
        return output

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        unbiased = variance * (count / (count - 1).clamp(min=1))
        with torch.no_grad():
            self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
            self.running_var.mul_(1 - factor).add_(unbiased.to(self.running_var.dtype), alpha=factor)


class SynchronisedBatchNorm1d(_Synchronised, nn.BatchNorm1d):
    """nn.BatchNorm1d with statistics of all replicas' batches."""


class SynchronisedBatchNorm2d(_Synchronised, nn.BatchNorm2d):
    """nn.BatchNorm2d with statistics of all replicas' batches."""


class SynchronisedBatchNorm3d(_Synchronised, nn.BatchNorm3d):
    """nn.BatchNorm3d with statistics of all replicas' batches."""


class _FollowsAll(InstanceNorm):
    """torch's InstanceNorm, whose running statistics follow all replicas' rows."""

    _paceline_group: _Shared | None

    def forward(self, input: Tensor) -> Tensor:
        shared = self._paceline_group
        group = None if shared is None else shared.group
        mean, variance = self.running_mean, self.running_var
        if not self.training or mean is None or variance is None or (group is None and _counts):
            return super().forward(input)
        before = mean.clone(), variance.clone()
        output = super().forward(input)
        if not _somewhere or group is None:
            with torch.no_grad():
                mean.copy_(before[0])
                variance.copy_(before[1])
            return output
        rows = float(input.shape[0] if input.dim() > self._get_no_batch_dim() else 1) if _counts else 0.0  # type: ignore[no-untyped-call]
        # Each replica has updated its statistics from its own rows only. Average them over the replicas, weighted by rows.
        sums = torch.cat([mean * rows, variance * rows, mean.new_tensor([rows])]).double()
        dist.all_reduce(sums, group=group)
        with torch.no_grad():
            for running, value in zip((mean, variance), (sums[:-1] / sums[-1]).chunk(2), strict=True):
                running.copy_(value.to(running.dtype))
        return output


class FollowingInstanceNorm1d(_FollowsAll, nn.InstanceNorm1d):
    """nn.InstanceNorm1d with running statistics of all replicas."""


class FollowingInstanceNorm2d(_FollowsAll, nn.InstanceNorm2d):
    """nn.InstanceNorm2d with running statistics of all replicas."""


class FollowingInstanceNorm3d(_FollowsAll, nn.InstanceNorm3d):
    """nn.InstanceNorm3d with running statistics of all replicas."""


_SYNCHRONISED: dict[type, type] = {
    nn.InstanceNorm1d: FollowingInstanceNorm1d,
    nn.InstanceNorm2d: FollowingInstanceNorm2d,
    nn.InstanceNorm3d: FollowingInstanceNorm3d,
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
}


class _Normalise(torch.autograd.Function):
    """An autograd function for batch normalisation over all ranks' rows, without padding."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
        counts: bool,
    ) -> tuple[Tensor, ...]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        first = torch.cat([wide.sum(axes).double(), wide.new_tensor([x.numel() // x.shape[1]]).double()])
        # Rows without a weight (padding) add 0 to sum and count. They take part because each rank must join each all-reduce.
        first = first if counts else torch.zeros_like(first)
        dist.all_reduce(first, group=group)
        count = first[-1]
        mean = (first[:-1] / count).to(wide.dtype)
        # The variance needs a second message, with the squared deviations from the mean. One message with sums of squares would
        # lose all digits of the variance if the mean is much larger than the deviations.
        centred = wide - _shaped(mean, x)
        second = centred.square().sum(axes).double()
        second = second if counts else torch.zeros_like(second)
        dist.all_reduce(second, group=group)
        variance = (second / count).to(wide.dtype)
        scale = torch.rsqrt(variance + eps)
        normal = centred * _shaped(scale, x)
        output = normal
        if weight is not None:
            output = output * _shaped(weight.to(wide.dtype), x)
        if bias is not None:
            output = output + _shaped(bias.to(wide.dtype), x)
        ctx.save_for_backward(normal, weight, bias, scale, count)
        ctx.group, ctx.counts, ctx.axes = group, counts, axes
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, bias, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        own_bias = grad.sum(ctx.axes)
        own_weight = (grad * normal).sum(ctx.axes)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # Sum over the rows of all ranks, because each row has influenced the mean and variance of all rows. Padding adds 0.
            sums = torch.cat([own_bias, own_weight]).double()
            dist.all_reduce(sums, group=ctx.group)
            of_bias, of_weight = (sums / count).to(normal.dtype).chunk(2)
            inner = grad - _shaped(of_bias, grad) - normal * _shaped(of_weight, grad)
            factor = scale if weight is None else scale * weight.to(normal.dtype)
            grad_x = (inner * _shaped(factor, grad)).to(grads[0].dtype)
            grad_x = grad_x if ctx.counts else torch.zeros_like(grad_x)
        grad_weight = own_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = own_bias.to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _without_statistics(module: BatchNorm, x: Tensor) -> Tensor:
    mean = module.running_mean if module.running_mean is not None else x.new_zeros(x.shape[1])
    variance = module.running_var if module.running_var is not None else x.new_ones(x.shape[1])
    return nn.functional.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)
