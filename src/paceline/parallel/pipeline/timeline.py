"""The schedules of a pipeline: each worker's calls and messages, their times, and drawings.

    order      the calls of one worker, in order
    program    these calls, with the worker's messages in between
    simulate   the time of each call, given the duration of each stage's forward and backward pass

    worker 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    worker 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..

The schedules are "gpipe", "1f1b" and "interleaved", and "forward" for a prediction, which has no backward passes. GPipe: Huang
et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream). Interleaved: Narayanan et al. 2021, section 2.2. The module needs only the
standard library, apart from matplotlib for the PNG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from paceline.parallel.errors import ParallelError


class StageCall(NamedTuple):
    """A forward ("F") or backward ("B") pass of one microbatch through one stage."""

    kind: str
    stage: int
    micro: int


class Send(NamedTuple):
    """A message with a call's result: activations, or gradients."""

    call: StageCall
    receiver: int


class Receive(NamedTuple):
    """A request for the message with another worker's result."""

    call: StageCall
    sender: int


Step = StageCall | Send | Receive


class Event(NamedTuple):
    """A call in a simulated step, with worker, start time and end time."""

    worker: int
    start: float
    end: float
    call: StageCall


def order(schedule: str, worker: int, workers: int, microbatches: int, chunks: int = 1) -> Iterator[StageCall]:
    """Yield the calls of one worker in order.

    With several `chunks` (stages per worker), the worker has the stages number worker, worker + workers, worker + 2 * workers ...
    """
    if schedule == "gpipe":
        stages = range(worker, workers * chunks, workers)
        yield from (StageCall("F", stage, micro) for stage in stages for micro in range(microbatches))
        yield from (StageCall("B", stage, micro) for stage in reversed(stages) for micro in range(microbatches))
    elif schedule == "forward":
        # Let each stage run as many microbatches in a row as there are workers, so that no worker has to wait.
        for first in range(0, microbatches, workers):
            group = range(first, min(first + workers, microbatches))
            yield from (
                StageCall("F", stage, micro) for stage in range(worker, workers * chunks, workers) for micro in group
            )
    elif schedule == "1f1b":
        # The last worker alternates forward and backward passes. Each worker before it is ahead by one more forward pass.
        ahead = min(microbatches, workers - worker)
        yield from (StageCall("F", worker, micro) for micro in range(ahead))
        for micro in range(microbatches):
            yield StageCall("B", worker, micro)
            if ahead + micro < microbatches:
                yield StageCall("F", worker, ahead + micro)
    else:
        yield from _interleaved(worker, workers, microbatches, chunks)


@lru_cache(maxsize=256)
def program(schedule: str, worker: int, workers: int, microbatches: int, chunks: int = 1) -> tuple[Step, ...]:
    """Return a worker's calls and messages in a step, in order.

    Sender and receiver order messages by simulated sending time. So all workers' programs are parts of one sequence,
    in which every call follows its inputs. Therefore no deadlock is possible, even if each message blocks both its ends.
    """
    own: list[Step] = []
    last = workers * chunks - 1
    events = simulate(schedule, workers, microbatches, chunks, backward=lambda stage: 2.0)
    # Sort the messages of all workers by the time of sending, then by sender. Every worker computes this same order, and then
    # takes the messages that it sends or receives itself from the order.
    for event in sorted(events, key=lambda event: (event.end, event.worker)):
        call = event.call
        if event.worker == worker:
            own.append(call)
        end = last if call.kind == "F" else 0
        if call.stage == end:
            continue
        receiver = (call.stage + (1 if call.kind == "F" else -1)) % workers
        if event.worker == worker:
            own.append(Send(call, receiver))
        elif receiver == worker:
            own.append(Receive(call, event.worker))
    return tuple(own)


def simulate(
    schedule: str,
    workers: int,
    microbatches: int,
    chunks: int = 1,
    *,
    forward: Callable[[int], float] = lambda stage: 1.0,
    backward: Callable[[int], float] = lambda stage: 1.0,
) -> list[Event]:
    """Return all workers' calls with their times.

    `forward` and `backward` map a stage to the duration of its pass. A call starts when its worker is free, and when the same
    microbatch has passed the previous stage (forward) or the next stage (backward). Messages take no time.
    """
    stages = workers * chunks
    todo = [list(order(schedule, worker, workers, microbatches, chunks)) for worker in range(workers)]
    ends: dict[StageCall, float] = {}
    free = [0.0] * workers
    events: list[list[Event]] = [[] for _ in range(workers)]
    while any(todo):
        moved = False
        for worker in range(workers):
            while todo[worker] and (ready := _ready(todo[worker][0], stages, ends)) is not None:
                call = todo[worker].pop(0)
                start = max(free[worker], ready)
                ends[call] = free[worker] = start + (forward if call.kind == "F" else backward)(call.stage)
                events[worker].append(Event(worker, start, ends[call], call))
                moved = True
        assert moved, "a schedule in which every worker waits for another"
    return [event for own in events for event in own]


def bubble(schedule: str, workers: int, microbatches: int, chunks: int = 1) -> float:
    """Return the fraction of a step in which workers are idle.

    It is (p - 1) / (v M + p - 1) for p workers, v stages per worker (1 unless "interleaved"), and M microbatches.
    """
    chunks = chunks if schedule == "interleaved" else 1
    return (workers - 1) / (chunks * microbatches + workers - 1)


@lru_cache(maxsize=4096)
def in_flight(schedule: str, stage: int, stages: int, workers: int, microbatches: int) -> int:
    """Return the largest number of microbatches whose activations a stage holds together."""
    kept = most = 0
    for call in order(schedule, stage % workers, workers, microbatches, stages // workers):
        if call.stage == stage:
            kept += 1 if call.kind == "F" else -1
            most = max(most, kept)
    return most


def _ready(call: StageCall, stages: int, ends: dict[StageCall, float]) -> float | None:
    if call.kind == "F":
        needs = [StageCall("F", call.stage - 1, call.micro)] if call.stage else []
    else:
        needs = [StageCall("F", call.stage, call.micro)]
        if call.stage < stages - 1:
            needs.append(StageCall("B", call.stage + 1, call.micro))
    if any(need not in ends for need in needs):
        return None
    return max((ends[need] for need in needs), default=0.0)


def _interleaved(worker: int, workers: int, microbatches: int, chunks: int) -> Iterator[StageCall]:
    """Yield the calls of the interleaved schedule, by groups of microbatches."""
    group = microbatches // max(1, microbatches // workers)
    calls = chunks * microbatches
    # Count the forward passes before a worker's first backward pass (Narayanan et al. 2021, section 2.2, and Megatron-LM).
    warm_up = min(calls, (chunks - 1) * group + 2 * (workers - 1 - worker))
    done: dict[tuple[str, int], int] = {}

    def call(kind: str, step: int) -> StageCall:
        turn = step // group % chunks
        stage = (turn if kind == "F" else chunks - 1 - turn) * workers + worker
        micro = done.get((kind, stage), 0)
        done[kind, stage] = micro + 1
        return StageCall(kind, stage, micro)

    for step in range(warm_up):
        yield call("F", step)
    for step in range(calls):
        if warm_up + step < calls:
            yield call("F", warm_up + step)
        yield call("B", step)


def draw_text(events: Sequence[Event], workers: int) -> str:
    """Draw one line per worker, with one cell per time unit.

    If a worker has several stages, each cell begins with the stage: `4:F0`. Times must be whole numbers.
    """
    several = any(event.call.stage >= workers for event in events)
    labels = {event: _label(event, several) for event in events}
    width = max(map(len, labels.values()), default=1)
    length = int(max((event.end for event in events), default=0))
    rows = [["." * min(width, 2)] * length for _ in range(workers)]
    for event in events:
        for unit in range(int(event.start), int(event.end)):
            rows[event.worker][unit] = labels[event]
    return "\n".join(
        f"worker {worker}  {' '.join(cell.ljust(width) for cell in row).rstrip()}" for worker, row in enumerate(rows)
    )


def save_png(events: Sequence[Event], workers: int, path: str | Path, title: str = "") -> Path:
    """Draw one row per worker as a PNG, and return its path.

    Raises:
        ParallelError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ParallelError(
            f"{path}: drawing a PNG needs matplotlib, which this Python doesn't have. pip install matplotlib, "
            "or print the schedule as text."
        ) from error
    length = max(event.end for event in events)
    figure = Figure(figsize=(min(24.0, 2.0 + 0.28 * length), 1.2 + 0.5 * workers), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    chunks = len({event.call.stage for event in events}) // workers
    for event in events:
        dark = event.call.kind == "B"
        # Draw later stages in slightly darker colors.
        shade = 0.15 * (event.call.stage // workers) / max(chunks - 1, 1)
        color = (0.13 - shade / 2, 0.44 - shade, 0.71 - shade) if dark else (0.78 - shade, 0.86 - shade, 0.94)
        axes.barh(
            event.worker, event.end - event.start, left=event.start, height=0.86, color=color, edgecolor="white", lw=0.8
        )
        axes.text(
            (event.start + event.end) / 2,
            event.worker,
            str(event.call.micro),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )
    axes.set(xlim=(0, length), yticks=range(workers), yticklabels=[f"worker {worker}" for worker in range(workers)])
    axes.set_xlabel("time (one forward pass of the average stage = 1)")
    axes.set_title(title or "light: forward, dark: backward, numbers: microbatches", fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    path = Path(path)
    figure.savefig(path, dpi=140)
    return path


def _label(event: Event, several: bool) -> str:
    text = f"{event.call.kind}{event.call.micro}"
    return f"{event.call.stage}:{text}" if several else text
