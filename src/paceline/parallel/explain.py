"""The text of `explain`: layout, cost and reason, and a pipeline's schedule.

Formulas for p stages, M microbatches, v stages per worker, n replicas or shards, W bytes of parameters, G bytes of gradients:

    bubble          (p - 1) / (v M + p - 1)                 speed-up   p (1 - bubble) (mean stage / slowest stage)
    all-reduce      2 (n - 1) / n * G  sent by each worker  FSDP       3 (n - 1) / n * W
    memory          4 W (parameters, gradients, Adam's two moments) + saved activations
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.parallel.forecast.predict import Forecast, aligned, all_forecasts, name_of_layout, shown_bytes, table
from paceline.parallel.memory_plan import PlannedHandle
from paceline.parallel.pipeline.cut import STATE_FACTOR, parameter_bytes
from paceline.parallel.pipeline.executor import Pipelined
from paceline.parallel.pipeline.timeline import Event, bubble, draw_text, in_flight, save_png, simulate

if TYPE_CHECKING:
    from paceline.parallel.batches.batch import Microbatch
    from paceline.parallel.executor import Executor
    from paceline.parallel.strategy import Layout

#: The greatest width, in columns, of a schedule that is drawn as text.
WIDEST = 200


class Explanation(str):
    """The text of `explain`, with a method that draws the pipeline's schedule.

    `events` are the calls of one step, empty without a pipeline.
    """

    events: list[Event]
    workers: int
    #: Name of a layout -> the layout's forecast. Empty until the model is measured. `chosen` is the name of the layout in use.
    forecasts: dict[str, Forecast]
    chosen: str

    def save_png(self, path: str | Path) -> Path:
        """Draw one step's schedule as a PNG. Return its path.

        Raises:
            ParallelError: matplotlib is missing, or the layout has no pipeline.
        """
        from paceline.parallel.errors import ParallelError

        if not self.events:
            raise ParallelError(f"{path}: there is no schedule to draw; the layout has no pipeline.")
        return save_png(self.events, self.workers, path)


class ExplainedHandle(PlannedHandle, Protocol):
    """The attributes of a training (`Parallel`) that `explain` reads."""

    reason: str | None
    source: str
    compared: str
    limit_bytes: int | None
    micro: Microbatch | None
    recompute: str | Sequence[str] | None


def explain(par: ExplainedHandle) -> Explanation:
    """Return the text of `Parallel.explain`, without any communication.

    Forecasts use the measurements of "auto", or else measurements on this rank.
    """
    world, task = par.world, par.task
    layout = world.layout
    lines = [f"{par.skeleton.name} on {world.size} worker{'s' * (world.size > 1)}: {layout}"]
    if par.reason:
        lines.append(f"  why: {par.reason}")
    if par.source:
        lines.append(f"  {par.source}")
    executor = par.executor
    events: list[Event] = []
    if isinstance(executor, Pipelined):
        events = _events(executor, task.at_once, layout)
        lines += _pipeline_lines(executor, task.at_once, layout)
    else:
        lines += [f"  {note}" for note in getattr(executor, "notes", ())]
        lines += _memory_lines(executor)
    if (memory := par.memory) is not None:
        lines.append(
            f"  memory: {shown_bytes(memory.needed)} are known to be needed here ({memory}); {shown_bytes(memory.free)} were "
            f"free beside the parameters ({memory.limit})"
        )
    lines += _traffic_lines(executor, layout)
    if par.compared:
        lines.append(f"  {par.compared}")
    forecasts: dict[str, Forecast] = {}
    chosen = name_of_layout(layout)
    if world.size > 1:
        forecasts, about = _forecasts(par)
        lines += table(list(forecasts.values()), par.limit_bytes, chosen) if forecasts else []
        lines += about
    if events:
        cells = draw_text(_rounded(task.at_once, layout), layout.pipe)
        if max(map(len, cells.splitlines())) <= WIDEST:
            lines += ["", f"  one step ({layout.schedule}): F forward, B backward, with the microbatch; .. waits"]
            lines += [f"  {line}" for line in cells.splitlines()]
    text = Explanation("\n".join(lines))
    text.events, text.workers = events, layout.pipe
    text.forecasts, text.chosen = forecasts, chosen
    return text


def _forecasts(par: ExplainedHandle) -> tuple[dict[str, Forecast], list[str]]:
    """Return layout's name -> forecast, and lines of text about the forecasts.

    The dict is empty if nothing could be measured.
    """
    from paceline.parallel.forecast.measure import measured
    from paceline.parallel.recompute import recompute

    task = par.task
    if par.measured is None:
        if par.micro is None or not par.micro.rows:
            return {}, ["  other layouts: forecast once a step was made"]
        try:
            model = par.skeleton.shell()
            if par.recompute is not None:
                recompute(model, par.recompute)
            par.measured = measured(model, task, [par.micro], par.device, par.optimizer)
        except Exception as error:
            # Catch every error, because the forecasts are only information, and must not end training.
            return {}, [f"  other layouts: not forecast ({type(error).__name__}: {str(error).partition(chr(10))[0]})"]
    forecasts = all_forecasts(par.measured, par.world.size, task.microbatches, task.at_once, par.world.layout)
    link = par.measured.bandwidth_bytes_s / 1e9
    return {name: forecast for name, (_, forecast) in forecasts.items()}, [
        f"   * is used, - needs more memory than there is; of the worker with the most, with {link:.2g} GB/s between workers"
    ]


def _pipeline_lines(executor: Pipelined, microbatches: int, layout: Layout) -> list[str]:
    plan, workers = executor.plan, layout.pipe
    costs = plan.plan.costs_s
    mean = sum(costs) / len(costs)
    rows = [("stage", "worker", "begins with", "blocks", "F + B ms", "share", "parameters", "kept", "memory")]
    for stage, (own, cost) in enumerate(zip(plan.plan.parts(plan.blocks), costs, strict=True)):
        held = parameter_bytes(own)
        # With FullyShard a worker has only its shard of the stage's parameters, gradients and optimizer state.
        memory = plan.plan.memory_bytes[stage] - STATE_FACTOR * held * (1 - 1 / layout.shard)
        kept = in_flight(layout.schedule, stage, plan.stages, workers, microbatches)
        rows.append(
            (
                str(stage),
                str(stage % workers),
                own[0].name,
                str(len(own)),
                f"{1e3 * sum(block.forward_s for block in own):.2f} + {1e3 * sum(block.backward_s for block in own):.2f}",
                f"{100 * cost / sum(costs):.0f} %",
                shown_bytes(held),
                f"{kept} x {shown_bytes(sum(block.activation_bytes for block in own))}",
                shown_bytes(memory),
            )
        )
    lines = [f"  {line}" for line in aligned(rows)]
    of_worker = [sum(costs[worker::workers]) for worker in range(workers)]
    balance = sum(of_worker) / workers / max(of_worker)
    idle = bubble(layout.schedule, workers, microbatches, layout.chunks)
    for name, stages in executor.ties.holders.items():
        lines.append(f"  tied: {name} is in stages {', '.join(map(str, stages))}; the copies get one gradient")
    lines += [
        f"  balance: the slowest worker takes {1 / balance:.2f} times the mean ({1e3 * mean:.2f} ms a stage and microbatch)",
        f"  bubble: {100 * idle:.0f} % of a step with {microbatches} microbatches and schedule {layout.schedule}",
        f"  expected: {workers * (1 - idle) * balance:.2f} times one worker with as many microbatches, if messages took no time",
        "  memory is an estimate for Adam: parameters, gradients, two moments, and the activations that are kept",
    ]
    return lines


def _memory_lines(executor: Executor) -> list[str]:
    from paceline.parallel.reduce import local

    params = list(executor.named_parameters().values())
    whole = sum(param.nbytes for param in params)
    own = sum(local(param).nbytes for param in params)
    return [
        f"  parameters: {shown_bytes(whole)}, of which this worker holds {shown_bytes(own)}",
        f"  memory for parameters, gradients and Adam's two moments: {shown_bytes(STATE_FACTOR * own)} on each worker, "
        "and the activations of its rows",
    ]


def _traffic_lines(executor: Executor, layout: Layout) -> list[str]:
    whole = sum(param.nbytes for param in executor.named_parameters().values())
    lines = []
    if layout.shard > 1:
        # A step has three messages: one gathers parameters before each of the two passes, and one reduce-scatters gradients.
        sent = 3 * (layout.shard - 1) / layout.shard * whole
        lines.append(
            f"  shard {layout.shard}: each worker sends about {shown_bytes(sent)} a step (3 (n - 1) / n of its parameters)"
        )
    if layout.data > 1:
        # Divide by the number of shards: a worker all-reduces only the gradients of its shard with the other replicas.
        sent = 2 * (layout.data - 1) / layout.data * whole / layout.shard
        lines.append(
            f"  data {layout.data}: each worker sends about {shown_bytes(sent)} a step (2 (n - 1) / n of its gradients)"
        )
    if layout.context > 1:
        lines.append(
            f"  context {layout.context}: each worker is sent the keys and values of all others for each attention, their "
            "gradients back, and once the gradients of all parameters"
        )
    if layout.expert > 1:
        lines.append(
            f"  expert {layout.expert}: one sum over a mixture's output, forward, and one over its input, backward"
        )
    if layout.tensor > 1:
        lines.append(
            f"  tensor {layout.tensor}: two sums over all activations for each block, forward, and two backward"
        )
    return lines


def _events(executor: Pipelined, microbatches: int, layout: Layout) -> list[Event]:
    """Return the pipeline's calls in one step, timed by measured costs.

    The unit of time is the average forward pass of a stage.
    """
    parts = executor.plan.plan.parts(executor.plan.blocks)
    forward = [sum(block.forward_s for block in part) for part in parts]
    backward = [sum(block.backward_s for block in part) for part in parts]
    # If all blocks take less than a tick of the clock, all measured times are 0. Then use 1.0 to avoid a division by 0.
    unit = sum(forward) / len(forward) or 1.0
    return simulate(
        layout.schedule,
        layout.pipe,
        microbatches,
        layout.chunks,
        forward=lambda stage: forward[stage] / unit,
        backward=lambda stage: backward[stage] / unit,
    )


def _rounded(microbatches: int, layout: Layout) -> list[Event]:
    return simulate(layout.schedule, layout.pipe, microbatches, layout.chunks, backward=lambda stage: 2.0)
