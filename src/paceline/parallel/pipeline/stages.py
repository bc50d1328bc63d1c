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
from paceline.parallel.failure import at_microbatch
from paceline.parallel.replicas import normalization, shard
from paceline.parallel.tracing.segments import Segment, Value


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One microbatch's way through one stage.

    batch: the microbatch's tensors. context: what the forward pass runs under, such as autocast.
    finish: (output, micro) -> the weighted loss, for the last stage when training; None leaves the output as it is.
    """

    segment: Segment
    micro: Microbatch
    batch: Sequence[Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    finish: Callable[[Any, Microbatch], Tensor] | None = None


class StageModule(nn.Module):
    """One stage's part of the model, under the model's names."""

    def forward(self, turn: Turn, *received: Tensor) -> Any:
        # FSDP2 has its hooks on this call. It looks for tensors among the arguments, and takes a `Turn` for something without
        # any: only what is received, which has gradients, is to be seen by it.
        # The part's code switches gradients off and on; an error in between must not leave them off.
        with torch.set_grad_enabled(torch.is_grad_enabled()), turn.context(), normalization.counting(turn.micro):
            result = turn.segment(self, received, turn.batch)
            if turn.finish is not None:
                return turn.finish(result, turn.micro)
        return result


class Stage:
    """Computes one stage of a step, microbatch by microbatch, and keeps what the backward passes need.

    index, count: which stage of how many in the whole pipeline.
    """

    def __init__(self, module: StageModule, index: int, count: int) -> None:
        self.module = module
        self.index = index
        self.is_last = index == count - 1
        self._turns: Sequence[Turn] = ()
        self._trains = False
        self._left = 0
        # Microbatch -> the tensors that came in and those that went out: the ends of its graph in this stage.
        self._kept: dict[int, tuple[Sequence[Tensor], tuple[Tensor, ...]]] = {}

    def begin(self, turns: Sequence[Turn], *, trains: bool) -> None:
        """Make ready for a step with these microbatches. trains: backward passes follow, for which values are kept."""
        self._turns = turns
        self._trains = trains
        self._left = len(turns)
        # A step that failed has left the graphs of its microbatches here.
        self._kept.clear()

    def comes(self, kind: str, micro: int) -> list[Value]:
        """The values that have to be received before the microbatch can go forward ("F") or back ("B")."""
        segment = self._turns[micro].segment
        return list(segment.receives) if kind == "F" else [value for value in segment.sends if value.requires_grad]

    def forward(self, micro: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values for the next stage; of the last stage the loss, or the output."""
        turn = self._turns[micro]
        # What is received is a leaf of this stage's graph: the backward pass ends here and leaves the gradient in
        # `.grad`.
        given = [
            tensor.requires_grad_(self._trains and value.requires_grad)
            for tensor, value in zip(received, turn.segment.receives, strict=True)
        ]
        with at_microbatch(turn.micro.index):
            result = self.module(turn, *given)
            made = (result,) if self.is_last else self._checked(result, turn.segment)
        if self._trains:
            self._kept[micro] = given, made
        return made

    def _checked(self, result: tuple[Tensor, ...], segment: Segment) -> tuple[Tensor, ...]:
        """The values for the next stage as they go into messages.

        Raises:
            ParallelError: a value is not what was announced: the shape depends on more than the batch's shapes, or it has a
                gradient that the next stage would not send back.
        """
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
        # A slice would be sent with what lies between its numbers.
        return tuple(tensor.contiguous() for tensor in result)

    def backward(self, micro: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients for the stage before, given those of what was sent that has some; of the loss none is given."""
        turn = self._turns[micro]
        given, made = self._kept.pop(micro)
        self._left -= 1
        with at_microbatch(turn.micro.index):
            # A loss has no gradient if all parameters of this stage, and all that it received, are frozen.
            if self.is_last:
                roots: list[tuple[Tensor, Tensor | None]] = [(loss, None) for loss in made if loss.requires_grad]
            else:
                trained = [
                    tensor for tensor, value in zip(made, turn.segment.sends, strict=True) if value.requires_grad
                ]
                roots = [(tensor, own) for tensor, own in zip(trained, gradients, strict=True) if tensor.requires_grad]
            # FSDP2 would sum the gradients and part the parameters in every backward pass; only the last one of the step
            # does so.
            shard.reduce_after_last(self.module, self._left == 0)
            if roots:
                tensors, own = zip(*roots, strict=True)
                with _explained(self.index):
                    torch.autograd.backward(tensors, own)
        sent = []
        for tensor in given:
            if tensor.requires_grad:
                # A value that this stage did not use has no gradient. Zeros go in its place: the stage before has posted
                # a receive for it, because the trace said that it has one.
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                sent.append(gradient.detach().contiguous())
        return sent


@contextlib.contextmanager
def _explained(stage: int) -> Iterator[None]:
    """Autograd's error for what was changed since the forward pass, as a sentence on why that is so here.

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
