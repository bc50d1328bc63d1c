"""Tensors on their way between the workers of a pipeline. Loaded on use: it imports torch.

Each message is posted by itself, in the order of `timeline.program`, which both of its ends keep: nothing else matches a
receive with its send. Backends that run messages one after the other, as NCCL does, never wait in a circle then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.pipeline.timeline import StageCall
from paceline.parallel.tracing.segments import Value

#: So many results of a worker may be on their way at once: the next one waits, or a fast stage would fill the memory.
UNDER_WAY = 2


class StageMessages:
    """The messages of one worker in a step.

    group: the workers of the pipeline, by their ranks in it. device: where tensors are received.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self._group = group
        self._device = device
        self._expected: dict[StageCall, list[tuple[Tensor, Any]]] = {}
        self._sent: deque[list[tuple[Tensor, Any]]] = deque()

    def begin(self) -> None:
        """Forget what a step that failed has left."""
        self._expected.clear()
        self._sent.clear()

    def expect(self, call: StageCall, values: Sequence[Value], sender: int) -> None:
        """Post the receives of what `call` needs."""
        buffers = [torch.empty(value.shape, dtype=value.dtype, device=self._device) for value in values]
        # The buffers are made here and not once for all: a microbatch keeps what it has received until its backward pass
        # is over.
        self._expected[call] = [(buffer, dist.irecv(buffer, group=self._group, group_src=sender)) for buffer in buffers]

    def take(self, call: StageCall) -> list[Tensor]:
        """Wait for the tensors that `call` needs; of the first stage forward, or the last one back, there are none."""
        return _arrived(self._expected.pop(call, []))

    def send(self, tensors: Sequence[Tensor], receiver: int) -> None:
        # To wait here can't end in a circle: the receiver posts its receives in the order of the same sequence
        # (`timeline.program`), in which those of the oldest messages stand before anything that waits for this worker's
        # next ones.
        while len(self._sent) >= UNDER_WAY:
            _arrived(self._sent.popleft())
        self._sent.append(
            [
                (tensor, dist.isend(tensor, group=self._group, group_dst=receiver))
                # detach: a message that is under way must not keep the microbatch's graph in memory.
                for tensor in (tensor.detach() for tensor in tensors)
            ]
        )

    def finish(self) -> None:
        """Wait until everything has left."""
        while self._sent:
            _arrived(self._sent.popleft())


def _arrived(under_way: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
    for _, work in under_way:
        work.wait()
    return [tensor for tensor, _ in under_way]
