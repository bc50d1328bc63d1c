"""One step of a pipeline: `timeline.program` run over messages between workers. Loaded on use: it imports torch.

Why not torch's schedules: what runs microbatches that are already cut is not public there, and changes with its releases.
What is drawn is what runs here. A loss is divided by nothing: the weights of the microbatches are in it already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.messages import StageMessages
from paceline.parallel.pipeline.stages import Stage
from paceline.parallel.pipeline.timeline import Receive, Send, StageCall, program


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
