"""A stage of a pipeline: what it holds of the model, and the passes of one microbatch. Loaded on use: it imports torch.

Why not torch's `PipelineStage`:

- without metadata it runs the model once on memory that nobody has filled, to see shapes, and BatchNorm's running
  statistics keep what was in there; here shapes come from the trace, and nothing is run to find them
- its receive buffers have the first microbatch's shape for ever, and there is one for each microbatch of a step; here each
  has the shape of its own microbatch, and lives from the message to the end of that microbatch's backward pass
- a traced stage of torch ignores `.eval()`; here a stage calls the model's own modules
- a stage that is told its shapes replaces methods that are not public, and three releases of torch have changed them
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError
from paceline.parallel.failure.watch import at_microbatch
from paceline.parallel.pytree import tensors_at
from paceline.parallel.replicas import normalization, shard
from paceline.parallel.tracing.segments import Segment, Value


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One microbatch's way through one stage.

    finish: (output, micro) -> the weighted loss, for the last stage when training; None leaves the output as it is.
    """

    segment: Segment
    micro: Microbatch
    finish: Callable[[Any, Microbatch], Tensor] | None = None


class StageModule(nn.Module):
    """What one stage holds of the model, under the model's names; called with the received tensors."""

    def begin(self, turn: Turn, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """What the next call computes, and under which context."""
        # Not by way of nn.Module, for which nothing of this is a part.
        self.__dict__["_turn"] = turn, context

    def forward(self, *received: Tensor) -> Any:
        turn, context = self.__dict__["_turn"]
        micro, segment = turn.micro, turn.segment
        batch = [tensor for _, tensor in tensors_at((micro.args, micro.kwargs))]
        # The part's code switches gradients off and on; an error in between must not leave them off.
        with torch.set_grad_enabled(torch.is_grad_enabled()), context(), normalization.counting(micro):
            result = segment(self, received, batch)
            if turn.finish is not None:
                return turn.finish(result, micro)
        return result

    def sent(self, result: tuple[Tensor, ...], stage: int) -> tuple[Tensor, ...]:
        """The values for the next stage as they go into messages.

        Raises:
            ParallelError: a value is not what was announced: the shape depends on more than the batch's shapes, or it has a
                gradient that the next stage would not send back.
        """
        segment = self.__dict__["_turn"][0].segment
        for tensor, value in zip(result, segment.sends, strict=True):
            if tensor.requires_grad and not value.requires_grad:
                raise ParallelError(
                    f"stage {stage} computed {value.name} with a gradient, which it had not when the model was traced; the next "
                    "stage would send none. Cut elsewhere (PipelineParallel(cut=[...])) so that it stays in one stage."
                )
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise ParallelError(
                    f"stage {stage} computed {value.name} of shape {list(tensor.shape)} and type {tensor.dtype}; expected were "
                    f"{list(value.shape)} and {value.dtype}. A value that goes from stage to stage must have a shape that the "
                    "batch's shapes alone decide; cut elsewhere (PipelineParallel(cut=[...])) so that it stays in one stage."
                )
        return tuple(tensor.contiguous() for tensor in result)


class Stage:
    """Computes one stage of a step, microbatch by microbatch, and keeps what the backward passes need.

    index: which stage of the whole pipeline. context: what each forward pass runs under, such as autocast.
    """

    def __init__(
        self, module: StageModule, index: int, count: int, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.module = module
        self.index = index
        self.is_last = index == count - 1
        self._context = context
        self._turns: Sequence[Turn] = ()
        self._left = 0
        # Microbatch -> what came in and what went out.
        self._kept: dict[int, tuple[Sequence[Tensor], tuple[Tensor, ...]]] = {}

    def begin(self, turns: Sequence[Turn]) -> None:
        """Make ready for a step with these microbatches.

        Raises:
            ParallelError: they don't have the same values in common.
        """
        first = turns[0].segment
        for turn in turns:
            if _grads(turn.segment) != _grads(first):
                raise ParallelError(
                    f"stage {self.index}: microbatch {turn.micro.index} takes another way through the model than "
                    f"microbatch {turns[0].micro.index}; other values cross the cut. Give the microbatches of a batch one shape "
                    "(drop_last=True, and rows that microbatches divides)."
                )
        self._turns = turns
        self._left = len(turns)
        # A step that failed has left its own.
        self._kept.clear()

    def comes(self, kind: str, micro: int) -> list[Value]:
        """What a worker has to receive before it can go forward ("F") or back ("B") with the microbatch."""
        segment = self._turns[micro].segment
        return list(segment.receives) if kind == "F" else [value for value in segment.sends if value.requires_grad]

    def forward(self, micro: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values for the next stage; of the last stage the loss."""
        turn = self._turns[micro]
        # Leaves, at which the backward pass of this stage ends.
        given = [
            tensor.requires_grad_(value.requires_grad)
            for tensor, value in zip(received, turn.segment.receives, strict=True)
        ]
        with at_microbatch(turn.micro.index):
            self.module.begin(turn, self._context)
            result = self.module(*given)
            made = (result,) if self.is_last else self.module.sent(result, self.index)
        self._kept[micro] = given, made
        return made

    def backward(self, micro: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients for the stage before, given those of what was sent that has some; of the loss none is given."""
        turn = self._turns[micro]
        given, made = self._kept.pop(micro)
        self._left -= 1
        with at_microbatch(turn.micro.index):
            if self.is_last:
                roots: list[tuple[Tensor, Tensor | None]] = [(loss, None) for loss in made if loss.requires_grad]
            else:
                trained = [
                    tensor for tensor, value in zip(made, turn.segment.sends, strict=True) if value.requires_grad
                ]
                roots = [(tensor, own) for tensor, own in zip(trained, gradients, strict=True) if tensor.requires_grad]
            shard.reduce_after_last(self.module, self._left == 0)
            if roots:
                tensors, own = zip(*roots, strict=True)
                with _explained(self.index):
                    torch.autograd.backward(tensors, own)
        sent = []
        for tensor in given:
            if tensor.requires_grad:
                # One that was not used has zeros, which the stage before waits for.
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                sent.append(gradient.detach().contiguous())
        return sent


@contextlib.contextmanager
def _explained(stage: int) -> Iterator[None]:
    """autograd's error for what was changed since the forward pass, as a sentence on why that is so here.

    Raises:
        ParallelError: in its place.
    """
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


def _grads(segment: Segment) -> tuple[Any, ...]:
    """What all microbatches of a step must have in common: how many values cross, and which have gradients."""
    return tuple(
        tuple((value.dtype, value.requires_grad) for value in values) for values in (segment.receives, segment.sends)
    )
