"""The computation that all layouts share: a model, its loss, and the weight of each microbatch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import TARGETS, LossFunction, Microbatch, Parts, SplitFunction, WeightFunction
from paceline.parallel.errors import ParallelError
from paceline.parallel.loss_means import MeanOver, StepMeans, few_rows, mean_over, wider_sample
from paceline.parallel.pytree import described, tensors_in


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss, and the settings for computing its gradients.

    Attributes:
        model: The user's whole model, on this rank's device.
        loss: (output, target) -> the mean loss of these rows, a 0-dim tensor.
        loss_weight: target -> the number by which that mean divides. None finds it in the loss's graph (`loss_means`).
        split: The user's batch -> Parts(args, kwargs, target).
        microbatches: The number of microbatches in a batch.
        accumulate: The number of groups into which the microbatches are divided. The groups run one after the other.
        precision: None, or "bf16" for autocast.
        means: The numbers by which the current step's losses divide.
    """

    model: nn.Module
    loss: LossFunction
    loss_weight: WeightFunction | None
    split: SplitFunction
    microbatches: int
    precision: str | None
    seed: int
    accumulate: int = 1
    means: StepMeans = field(default_factory=StepMeans)

    @property
    def at_once(self) -> int:
        """The number of microbatches that go through a pipeline together."""
        return max(self.microbatches // self.accumulate, 1)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context for the forward pass and the loss."""
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16)

    def loss_of(self, output: object, target: object) -> Tensor:
        """Return the loss. Raise ParallelError unless the loss is one number."""
        loss: object = self.loss(output, target)
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss
        raise ParallelError(
            f"loss(output, target) returned {described(loss)}; it has to return the mean over the rows as one number (a 0-dim "
            "tensor), such as F.cross_entropy does."
        )

    def weighted_loss(self, output: object, micro: Microbatch) -> Tensor:
        """Return the microbatch's share of the mean loss, 0-dim.

        A microbatch of weight 0 (padding, or only ignored targets) gives 0 with gradients of 0, even if its loss is nan.
        Without a loss_weight each loss is weighted by the number that it divides by, so the caller must multiply the sum of all
        shares by `means.factor()`.
        """
        means, is_part = self.means, float(micro.weight) < 1.0
        if float(micro.weight) == 0.0:
            if means.keeps_state and micro.rows == 0 and micro.global_rows:
                # This replica has no rows. Still call the loss, to update its state as on the replicas with rows.
                with torch.no_grad():
                    self.loss(output, micro.target)
            return zero_loss(output)
        if is_part and means.checks and (means.sample is None or means.has_hidden):
            means.sample = wider_sample(means.sample, few_rows(output, micro.target))
        loss = self.loss_of(output, micro.target)
        if torch.is_grad_enabled() and not loss.requires_grad and any(x.requires_grad for x in tensors_in(output)):
            raise ParallelError(
                "loss(output, target) returned a number without a gradient, though the output has a gradient: nothing would be "
                "trained. Leave .item(), .detach() and torch.no_grad() out of the loss."
            )
        # Multiply in float32 or a wider dtype, because bf16 would round a share such as 1/3 to three digits.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        over = mean_over(loss, (output, micro.target)) if is_part and self.loss_weight is None else None
        if over is None:
            return loss * micro.weight.to(loss.device, dtype)
        if over.is_hidden and self.loss is own_loss:
            refuse_ignored(micro, "loss_weight")
        if over.counts_nothing(loss):
            return loss * micro.weight.to(loss.device, dtype)
        if over.count == 0:
            means.add(MeanOver(0.0), 0.0, micro.rows)
            return zero_loss(output)
        return loss * loss.new_tensor(means.add(over, float(micro.weight), micro.rows), dtype=dtype)


def refuse_ignored(micro: Microbatch, option: str) -> None:
    """Raise if targets are -100. `option` is the argument with the number of targets that count."""
    if any(x.dtype in (torch.int64, torch.int32) and bool((x == -100).any()) for x in tensors_in(micro[:2])):
        raise ParallelError(
            "the model computes its own loss by a fused or compiled operator or without gradients, which hides how many targets "
            f"count, and this batch has targets of -100, which do not. Say how many count: {option}=lambda target: "
            "(target[..., 1:] != -100).sum() for a causal language model."
        )


def zero_loss(output: object) -> Tensor:
    """Return a loss of 0 that gives every tensor of `output` a gradient of 0.

    A rank without rows uses it, so that its backward pass has the same steps as on other ranks.
    """
    tensors = tensors_in(output)
    chosen = [x for x in tensors if x.requires_grad] or [x for x in tensors if x.is_floating_point()][:1]
    if not chosen:
        raise ParallelError(
            f"the model returned {type(output).__name__} without a floating-point tensor, which the loss needs."
        )
    # Use nan_to_num, because the output for a padding row may be infinite, and 0 times infinity is nan.
    zero = functools.reduce(torch.add, (torch.nan_to_num(x, 0.0, 0.0, 0.0).sum() * 0.0 for x in chosen))
    # Return the dtype that `weighted_loss` returns for a microbatch that counts.
    return zero.to(torch.promote_types(zero.dtype, torch.float32))


def own_loss(output: Any, target: object) -> Tensor:
    """Return the loss that a model has returned in its output.

    The loss is the output itself (0-dim), the entry "loss" of a dict, the attribute `loss`, or the first value of a tuple.

    Raises:
        ParallelError: The output has none of these.
    """
    loss: object = None
    match output:
        case Tensor():
            loss = output
        case Mapping():
            loss = output.get("loss")
        case _ if hasattr(output, "loss"):
            loss = output.loss
        case (first, *_):
            loss = first
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    raise ParallelError(
        f"loss=None takes the model's own loss, and the model returned {described(output)} without one: a number (a 0-dim "
        'tensor), a dict or an object with "loss", or a tuple that begins with it. Are the labels in the batch? Or give a loss '
        "of (output, target)."
    )


def own_split(model: nn.Module) -> SplitFunction:
    """Return a split function that gives the model the whole batch, labels too."""
    takes = inspect.signature(model.forward)

    def split(batch: object) -> Parts:
        match batch:
            case Mapping():
                targets = [batch[name] for name in TARGETS if name in batch]
                parts = Parts((), dict(batch), targets[0] if len(targets) == 1 else dict(batch))
            case tuple() | list():
                parts = Parts(tuple(batch), {}, [None, *batch][-1])
            case _:
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
