"""A stage for torch's pipeline schedules that knows what it will receive. Loaded on use: it imports torch.

Why not torch's `PipelineStage` as it is:

- without metadata it runs the model once on memory that nobody has filled, to see shapes, and BatchNorm's running
  statistics keep what was in there; here shapes come from the trace, and nothing is run to find them
- its receive buffers have the first microbatch's shape for ever, and there is one for each microbatch of a step; here each
  has the shape of its own microbatch, and lives from the message to the end of that microbatch's backward pass
- a traced stage of torch ignores `.eval()`; here a stage calls the model's own modules
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from paceline.parallel.batches.batch import Micro
from paceline.parallel.errors import ParallelError
from paceline.parallel.failure.watch import at_microbatch
from paceline.parallel.replicas import normalization
from paceline.parallel.torch_private import _RecvInfo, extract_tensor_meta, gradient_metas
from paceline.parallel.tracing.containers import tensors_at
from paceline.parallel.tracing.segments import Segment, Value


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One microbatch's way through one stage.

    finish: (output, micro) -> the weighted loss, for the last stage when training; None leaves the output as it is.
    """

    segment: Segment
    micro: Micro
    finish: Callable[[Any, Micro], Tensor] | None = None


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
            ParallelError: a value is not what was announced: the shape depends on more than the batch's shapes.
        """
        segment = self.__dict__["_turn"][0].segment
        for tensor, value in zip(result, segment.sends, strict=True):
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise ParallelError(
                    f"stage {stage} computed {value.name} of shape {list(tensor.shape)} and type {tensor.dtype}; expected were "
                    f"{list(value.shape)} and {value.dtype}. A value that goes from stage to stage must have a shape that the "
                    "batch's shapes alone decide; cut elsewhere (Pipeline(cut=[...])) so that it stays in one stage."
                )
        return tuple(tensor.contiguous() for tensor in result)


class ReplayStage(PipelineStage):
    """A stage whose microbatches may differ in shape; `begin` says what comes before each step."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        count: int,
        *,
        device: torch.device,
        group: Any,
        turns: Sequence[Turn],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._context = context
        segment = turns[0].segment
        super().__init__(
            module,
            index,
            count,
            device,
            # With both given, torch infers nothing.
            input_args=tuple(map(_example, segment.receives)),
            output_args=tuple(map(_example, segment.sends)),
            group=group,
        )
        self.begin(turns)

    def begin(self, turns: Sequence[Turn]) -> None:
        """Make ready for a step with these microbatches."""
        self._turns = turns
        self.chunks = len(turns)
        first = turns[0].segment
        for turn in turns:
            if _grads(turn.segment) != _grads(first):
                raise ParallelError(
                    f"stage {self.stage_index}: microbatch {turn.micro.index} takes another way through the model than "
                    f"microbatch {turns[0].micro.index}; other values cross the cut. Give the microbatches of a batch one shape "
                    "(drop_last=True, and rows that microbatches divides)."
                )
        metas = [_metas(turn.segment.receives) for turn in turns]
        self._stage_meta.inputs = metas[0]
        self._stage_meta.outputs = _metas(first.sends)
        self._stage_meta.input_grads = gradient_metas(metas[0])
        self._stage_meta.output_grads = gradient_metas(self._stage_meta.outputs)
        self.args_recv_info = {
            chunk: tuple(
                _RecvInfo(f"input {index}", self.stage_index - 1, None, meta) for index, meta in enumerate(own)
            )
            for chunk, own in enumerate(metas)
        }
        # The last stage gives its loss, which goes nowhere.
        self.act_send_info = {index: [self.stage_index + 1] for index in range(len(first.sends))} or {0: []}
        self.grad_recv_info = {
            chunk: tuple(
                _RecvInfo(f"gradient {index}", self.stage_index + 1, None, meta)
                for index, meta in enumerate(gradient_metas(_metas(turn.segment.sends)))
            )
            for chunk, turn in enumerate(turns)
        }
        self.grad_send_info = None

    # torch would allocate here, for all microbatches alike.
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        _fill(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            _fill(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _get_recv_ops(self, recv_infos: Any) -> list[Any]:
        # Slots without a gradient have neither buffer nor message.
        return super()._get_recv_ops(tuple(info for info in recv_infos if info.buffer is not None))

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        turn = self._turns[fwd_chunk_id]
        module: Any = self.submod
        with at_microbatch(turn.micro.index):
            module.begin(turn, self._context)
            with _own_error():
                return super().forward_one_chunk(fwd_chunk_id, (), {}, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        module: Any = self.submod
        return result if self.is_last else module.sent(result, self.stage_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with at_microbatch(self._turns[bwd_chunk_id].micro.index), _own_error():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def _get_grad_send_meta(self, input_idx: int) -> Any:
        raise AssertionError("torch asks for a gradient's shape without saying of which microbatch")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """As torch's, with zeros of this microbatch's own shape for an input that got no gradient."""
        if not self.has_backward or self.is_first:
            return []
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        metas = gradient_metas(_metas(self._turns[bwd_chunk_id].segment.receives))
        peer = self._resolve_peer_global_rank(self.stage_index - 1)
        messages = []
        for gradient, meta in zip(gradients, metas, strict=True):
            if meta is None:
                continue
            own = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) if gradient is None else gradient
            messages.append(torch.distributed.P2POp(torch.distributed.isend, own.contiguous(), peer, self.group))
        return messages


@contextlib.contextmanager
def _own_error() -> Any:
    """torch wraps what fails in a stage into a RuntimeError that lists its arguments; the user's own error says more."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and (
            "failed to run forward" in str(error) or "Failed to run stage" in str(error)
        ):
            raise error.__cause__ from None
        raise


def _fill(infos: Sequence[Any], device: torch.device) -> None:
    for info in infos:
        if info.tensor_meta is not None:
            info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device)


def _example(value: Value) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


@lru_cache(maxsize=1024)
def _metas(values: tuple[Value, ...]) -> tuple[Any, ...]:
    return tuple(extract_tensor_meta(_example(value)) for value in values)


def _grads(segment: Segment) -> tuple[Any, ...]:
    """What all microbatches of a step must have in common: how many values cross, and which have gradients."""
    return tuple(
        tuple((value.dtype, value.requires_grad) for value in values) for values in (segment.receives, segment.sends)
    )
