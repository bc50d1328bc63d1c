"""Run one step of a pipeline: the calls of `timeline.program`, with messages between workers.

torch's schedules are not used, because their part that runs given microbatches is private and changes between releases.
Losses are not divided by the number of microbatches, because the microbatches' weights include this division.

Sender and receiver post each message separately, in the order of `timeline.program`. Only this order matches a receive
with its send. So a backend that runs messages one after the other, such as NCCL, cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.stages import Stage
from paceline.parallel.pipeline.timeline import Receive, Send, StageCall, program
from paceline.parallel.tracing.segments import Value

#: A tensor that is being sent or received, and torch's handle of this transfer.
_Message = tuple[Tensor, dist.Work | None]

#: At most this many results of a worker may be in transfer. Without this limit a fast stage would fill the memory.
UNDER_WAY = 2


def check_microbatches(schedule: str, workers: int, microbatches: int) -> None:
    """Raise ParallelError if the schedule does not accept this number of microbatches."""
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
) -> Iterator[tuple[int, Tensor]]:
    """Run one step. On the last stage's worker, yield each microbatch's (number, result).

    Every worker must exhaust the iterator. A result is a loss, or in a prediction (schedule "forward")
    an output. If the last batch of an epoch has too few microbatches for the schedule, all forward passes come first.

    Raises:
        RuntimeError: A message does not arrive, because the other worker has ended or hangs.
    """
    workers = messages.workers
    if schedule != "forward":
        try:
            check_microbatches(schedule, workers, microbatches)
        # If there are too few microbatches for the schedule, as in an epoch's last batch, use GPipe, which accepts any number.
        except ParallelError:
            schedule = "gpipe"
    of_index = {stage.index: stage for stage in stages}
    # The tensors that the last forward or backward pass returned. A following `Send` sends them.
    made: Sequence[Tensor] = ()
    messages.begin()
    for step in program(schedule, messages.worker, workers, microbatches, len(stages)):
        match step:
            case Receive(call, sender):
                # The result of a forward pass ("F") goes to the next stage, and the result of a backward pass ("B") to the former
                # stage. The trace has the tensors' shapes, so the sender need not send the shapes.
                needs = call._replace(stage=call.stage + (1 if call.kind == "F" else -1))
                messages.expect(needs, of_index[needs.stage].comes(needs.kind, needs.micro), sender)
            # Sends and receives don't wait, so computation overlaps with messages. Only `take` waits for inputs.
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
    """The messages of one worker in one step of a pipeline.

    `group` has the pipeline's workers. Tensors are received on `device`.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self._group = group
        self._device = device
        self._expected: dict[StageCall, list[_Message]] = {}
        self._sent: deque[list[_Message]] = deque()

    def begin(self) -> None:
        """Forget messages of a failed step."""
        self._expected.clear()
        self._sent.clear()

    def expect(self, call: StageCall, values: Sequence[Value], sender: int) -> None:
        """Post receives from the worker `sender` for the inputs of `call`."""
        buffers = [torch.empty(value.shape, dtype=value.dtype, device=self._device) for value in values]
        # Use new buffers each time: a microbatch needs its received tensors until its backward pass.
        self._expected[call] = [(buffer, dist.irecv(buffer, group=self._group, group_src=sender)) for buffer in buffers]

    def take(self, call: StageCall) -> list[Tensor]:
        """Wait for the inputs of `call` and return them.

        The list is empty for the first stage's forward pass and the last stage's backward pass.
        """
        return _arrived(self._expected.pop(call, []))

    def send(self, tensors: Sequence[Tensor], receiver: int) -> None:
        # This wait cannot deadlock, because sender and receiver order their messages alike (`timeline.program`): the receiver
        # takes these messages before it waits for any later message of this worker.
        while len(self._sent) >= UNDER_WAY:
            _arrived(self._sent.popleft())
        self._sent.append(
            [
                (tensor, dist.isend(tensor, group=self._group, group_dst=receiver))
                # Send detached tensors: a message in flight must not keep the microbatch's graph in memory.
                for tensor in (tensor.detach() for tensor in tensors)
            ]
        )

    def finish(self) -> None:
        while self._sent:
            _arrived(self._sent.popleft())


def _arrived(under_way: Sequence[_Message]) -> list[Tensor]:
    for _, work in under_way:
        assert work is not None  # torch returns None only to ranks outside of the group
        work.wait()
    return [tensor for tensor, _ in under_way]
