"""One step of a pipeline: `timeline.program` run over messages between workers. Loaded on use: it imports torch.

Why not torch's schedules: what runs microbatches that are already cut is not public there, and changes with its releases.
What is drawn is what runs here. A loss is divided by nothing: the weights of the microbatches are in it already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.stages import Stage
from paceline.parallel.pipeline.timeline import Receive, Send, StageCall, program
from paceline.parallel.tracing.segments import Value

#: So many results of a worker may be on their way at once: the next one waits, or a fast stage would fill the memory.
UNDER_WAY = 2


def check_microbatches(schedule: str, workers: int, microbatches: int) -> None:
    """Raise if a step of so many microbatches can't go through.

    Raises:
        ParallelError: naming the numbers that can.
    """
    if microbatches < workers and schedule != "gpipe":
        raise ParallelError(
            f"microbatches={microbatches} with a pipeline of {workers} stages: some would never have work. Give at least "
            f"microbatches={workers}; {4 * workers} keep them busy {100 * 4 * workers // (5 * workers - 1)} % of the time."
        )
    if schedule == "interleaved" and microbatches % max(1, microbatches // workers):
        good = [count for count in range(workers, 4 * workers + microbatches) if count % (count // workers) == 0]
        near = sorted(good, key=lambda count: (abs(count - microbatches), count))[:3]
        raise ParallelError(
            f"microbatches={microbatches}: the interleaved schedule sends them round in {microbatches // workers} equal groups. "
            f"Give one of {', '.join(map(str, sorted(near)))}."
        )


def run(
    schedule: str, stages: Sequence[Stage], microbatches: int, messages: StageMessages
) -> Iterator[tuple[int, Any]]:
    """One step of this worker's stages; gives (microbatch, loss or output) as the last stage has it, where that is.

    It has to be run to its end on every worker. schedule: "forward" under torch.no_grad for a prediction. A last batch may
    have fewer microbatches than a schedule takes; then all go forward first.

    Raises:
        RuntimeError: a message doesn't come, for the other worker is gone or silent.
    """
    workers = messages.workers
    if schedule != "forward":
        try:
            check_microbatches(schedule, workers, microbatches)
        # A batch in fewer microbatches than the schedule takes, as the last one of an epoch may be.
        except ParallelError:
            schedule = "gpipe"
    of_index = {stage.index: stage for stage in stages}
    # A send comes right after the call whose result it takes.
    made: Sequence[Tensor] = ()
    messages.begin()
    for step in program(schedule, messages.worker, workers, microbatches, len(stages)):
        match step:
            case Receive(call, sender):
                # The call that needs the result: that of the next stage on the way forward, of the stage before on the
                # way back. Its buffers have the shapes of that very microbatch, which the trace has told; nothing is
                # asked of the sender.
                needs = call._replace(stage=call.stage + (1 if call.kind == "F" else -1))
                messages.expect(needs, of_index[needs.stage].comes(needs.kind, needs.micro), sender)
            # Neither of these waits for the other worker, so a computation goes on while its messages are under way. Only
            # `take` waits, for what the next call needs.
            case Send(_, receiver):
                messages.send(made, receiver)
            case StageCall("F", stage, micro):
                made = of_index[stage].forward(micro, messages.take(step))
                if of_index[stage].is_last:
                    yield micro, made[0]
            case StageCall(_, stage, micro):
                made = of_index[stage].backward(micro, messages.take(step))
    messages.finish()


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
