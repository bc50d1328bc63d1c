"""torch's pipeline schedules, run on microbatches that are already cut. Loaded on use: it imports torch.

Their public `step` cuts a batch itself, into equal parts, and says nothing of weights. What runs the microbatches has a
leading underscore in torch 2.13; nothing else calls it. `scale_grads` is off everywhere: torch divides what is in `.grad` once
for each stage and step, earlier microbatches and weights shared by two stages of a worker included. The weights do it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.stages import ReplayStage


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


def make_schedule(name: str, stages: Sequence[ReplayStage], microbatches: int, *, trains: bool = True) -> Any:
    """torch's schedule for this worker's stages.

    A last batch may have fewer microbatches than the schedule takes; then all go forward first.
    """
    options: dict[str, Any] = {"loss_fn": _loss if trains else None, "scale_grads": False}
    try:
        check_microbatches(name, stages[0].group_size, microbatches)
    except ParallelError:
        name = "gpipe"
    if len(stages) > 1:
        kind: Any = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleLoopedBFS
        return kind(list(stages), microbatches, **options)
    return (ScheduleGPipe if name == "gpipe" else Schedule1F1B)(stages[0], microbatches, **options)


def run(schedule: Any, stages: Sequence[ReplayStage]) -> list[Tensor]:
    """One step, forward and backward; the losses of the microbatches where the last stage is, else nothing."""
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    count = schedule._n_microbatches
    losses: list[Tensor] = []
    schedule._step_microbatches([()] * count, [{}] * count, [None] * count, losses, return_outputs=False)
    return losses


def _loss(output: Tensor, target: None) -> Tensor:
    """The last stage's own output: the weighted loss is computed in it."""
    return output
