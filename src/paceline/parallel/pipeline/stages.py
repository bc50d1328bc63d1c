"""A stage of a pipeline: its part of the model, and the passes of one microbatch.

torch's `PipelineStage` is not used for these reasons:

    shapes     Without given shapes, torch's stage runs the model on uninitialised memory to find them, which corrupts
               BatchNorm's running statistics. Paceline's shapes come from the trace.
    buffers    torch's stage has receive buffers for all microbatches, of the first one's shape. In Paceline each microbatch
               has buffers of its own shape, which are freed after its backward pass.
    eval       A traced torch stage ignores `.eval()`. A stage of Paceline calls the model's own modules.
    privates   To set shapes, a subclass must override private methods of torch's stage, which three releases changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError
from paceline.parallel.failure import at_microbatch
from paceline.parallel.replicas import normalization, shard
from paceline.parallel.tracing.segments import Segment, Value


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """The pass of one microbatch through one stage of a pipeline.

    Attributes:
        segment: The stage's part of the model.
        batch: The microbatch's tensors.
        context: Returns a context manager for the forward pass, such as autocast.
        finish: (output, micro) -> the weighted loss, for the last stage in training. None returns the output.
    """

    segment: Segment
    micro: Microbatch
    batch: Sequence[Tensor]
    context: Callable[[], AbstractContextManager[object]]
    finish: Callable[[object, Microbatch], Tensor] | None = None


class StageModule(nn.Module):
    """One stage's part of the model, under the model's names."""

    def forward(self, turn: Turn, *received: Tensor) -> object:
        # FSDP2's hooks look for tensors with gradients in arguments, but not inside `turn`. So pass `received`
        # separately. `set_grad_enabled` restores the mode if the stage's code fails while gradients are off.
        with torch.set_grad_enabled(torch.is_grad_enabled()), turn.context(), normalization.counting(turn.micro):
            result = turn.segment(self, received, turn.batch)
            return result if turn.finish is None else turn.finish(result, turn.micro)


class Stage:
    """One stage's computation of a step.

    The stage has number `index` of `count`. It keeps the tensors that its backward passes need.
    """

    def __init__(self, module: StageModule, index: int, count: int) -> None:
        self.module = module
        self.index = index
        self.is_last = index == count - 1
        self._turns: Sequence[Turn] = ()
        self._trains = False
        self._left = 0
        # Number of a microbatch -> (received tensors, sent tensors): where the microbatch's graph in this stage starts and ends.
        self._kept: dict[int, tuple[Sequence[Tensor], tuple[Tensor, ...]]] = {}

    def begin(self, turns: Sequence[Turn], *, trains: bool) -> None:
        """Prepare a step with these passes of microbatches. `trains`: Whether backward passes follow."""
        self._turns = turns
        self._trains = trains
        self._left = len(turns)
        # Clear the graphs of microbatches that a failed step has left.
        self._kept.clear()

    def comes(self, kind: str, micro: int) -> list[Value]:
        """Describe the tensors to receive before a microbatch's forward ("F") or backward ("B") pass."""
        segment = self._turns[micro].segment
        return list(segment.receives) if kind == "F" else [value for value in segment.sends if value.requires_grad]

    def forward(self, micro: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward pass. Return the next stage's inputs, or the final result."""
        turn = self._turns[micro]
        # Received tensors are leaves of this stage's graph, so the backward pass leaves their gradients in `.grad`.
        inputs = [
            tensor.requires_grad_(torch.is_grad_enabled() and value.requires_grad)
            for tensor, value in zip(received, turn.segment.receives, strict=True)
        ]
        with at_microbatch(turn.micro.index):
            result = self.module(turn, *inputs)
            made = (result,) if self.is_last else self._checked(result, turn.segment)
        if self._trains:
            self._kept[micro] = inputs, made
        return made

    def _checked(self, result: tuple[Tensor, ...], segment: Segment) -> tuple[Tensor, ...]:
        """Return contiguous results. Raise ParallelError if they differ from the trace."""
        for tensor, value in zip(result, segment.sends, strict=True):
            if tensor.requires_grad and not value.requires_grad:
                raise ParallelError(
                    f"stage {self.index} computed {value.name} with a gradient, which it had not when the model was traced; the "
                    "next stage would send none. Cut elsewhere (PipelineParallel(cut=[...])) so that it stays in one stage."
                )
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise ParallelError(
                    f"stage {self.index} computed {value.name} of shape {list(tensor.shape)} and type {tensor.dtype}; expected "
                    f"were {list(value.shape)} and {value.dtype}. A value that goes from stage to stage must have a shape that "
                    "the batch's shapes alone decide; cut elsewhere (PipelineParallel(cut=[...])) so that it stays in one stage."
                )
        # Make slices contiguous: otherwise the gaps between their elements would be sent, too.
        return tuple(tensor.contiguous() for tensor in result)

    def backward(self, micro: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward pass; return the gradients for the previous stage."""
        turn = self._turns[micro]
        inputs, made = self._kept.pop(micro)
        self._left -= 1
        with at_microbatch(turn.micro.index):
            # Skip a loss without a gradient: all parameters and inputs of this stage are frozen.
            if self.is_last:
                roots: list[tuple[Tensor, Tensor | None]] = [(loss, None) for loss in made if loss.requires_grad]
            else:
                trained = [
                    tensor for tensor, value in zip(made, turn.segment.sends, strict=True) if value.requires_grad
                ]
                roots = [(tensor, own) for tensor, own in zip(trained, gradients, strict=True) if tensor.requires_grad]
            # FSDP2 would sum gradients and free parameters in every backward pass. Let only the step's last pass do so.
            shard.reduce_after_last(self.module, self._left == 0)
            if roots:
                tensors, own = zip(*roots, strict=True)
                with _explained(self.index):
                    torch.autograd.backward(tensors, own)
        sent = []
        for tensor in inputs:
            if tensor.requires_grad:
                # Send zeros for a value that this stage has not used: the former stage waits for a gradient of each value.
                sent.append((torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).detach().contiguous())
        return sent


@contextlib.contextmanager
def _explained(stage: int) -> Iterator[None]:
    """Replace autograd's error about tensors changed in place by a ParallelError with advice."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise ParallelError(
            f"a block of stage {stage} changes a parameter or a buffer in its forward pass which its backward pass needs (a "
            "momentum copy, for example), and in a pipeline the next microbatch's forward pass comes before this one's backward "
            "pass. Change it in the loop, after step(), let the block compute with a copy (tensor.clone()), or use "
            f"DataParallel() or FullyShard(). torch says: {str(error).partition(chr(10))[0]}"
        ) from error
