"""Memory, time and traffic of a layout, computed from a model's measured blocks.

d replicas, s shards, p stages, t tensor, c context parts, M microbatches in groups of m, W bytes of parameters, G of gradients:

    time      M (forward + backward of all blocks)           p > 1: the simulated schedule of the best cut, M / m times
              + (2 (d - 1) / d G / s + 3 M (s - 1) / s W) / bandwidth + optimizer
    memory    W + G + optimizer, of this worker's part, + saved activations + with shards the gathered blocks
    sent      data: 2 (d - 1) / d G / s    shard: 3 M (s - 1) / s W    pipe: 2 M live bytes at each end of a stage
              tensor: for each block four sums of its input, 2 (t - 1) / t each; expert: the same with t expert parts
              context: for each block keys, values and their gradients, (c - 1) / c each, and gradients as data does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.cut import Block, find_cuts, parameter_bytes
from paceline.parallel.pipeline.timeline import bubble, in_flight, simulate
from paceline.parallel.strategy import (
    DataParallel,
    FullyShard,
    Joinable,
    Layout,
    PipelineParallel,
    TensorParallel,
    resolve,
    shown,
    strategy_of,
)

#: FSDP2's extra memory as a multiple of a block's size (measured: 5.4 to 5.8): two blocks, their gradients, and two messages.
WHOLE_BLOCKS = 5.5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a model's blocks, for predictions of other layouts.

    Attributes:
        rows: The number of rows in the measured microbatch.
        all_rows: The number of rows in that microbatch over all replicas.
        small: Measurements of the same blocks for `small_rows` rows, which take more time per row. If empty, time is
            proportional to rows.
        trained_share: The fraction of the parameters' bytes that gets gradients.
        unit_bytes: The size of FullyShard's largest block.
        optimizer_factor: Values that the optimizer keeps for each number of a parameter.
        optimizer_s_a_byte: Seconds of an optimizer step per byte of trained parameters.
        cut_share: The fraction of the parameters' bytes that TensorParallel could cut.
        expert_share: The fraction of the parameters' bytes that belongs to experts.
        reason: Why a pipeline is impossible, or "".
    """

    rows: int
    all_rows: int
    blocks: tuple[Block, ...]
    small_rows: int = 0
    small: tuple[Block, ...] = ()
    trained_share: float = 1.0
    unit_bytes: int = 0
    optimizer_factor: int = 2
    optimizer_s_a_byte: float = 0.0
    cut_share: float = 0.0
    expert_share: float = 0.0
    bandwidth_bytes_s: float = 2e9
    reason: str = ""

    def at(self, rows: float) -> tuple[Block, ...]:
        """Return the blocks with the costs for another number of rows.

        Interpolate times linearly between `self.rows` and `small_rows` rows. Bytes are proportional to rows.
        """
        share = rows / self.rows
        blocks = []
        for index, block in enumerate(self.blocks):
            forward_s, backward_s = block.forward_s * share, block.backward_s * share
            if self.small and self.small_rows != self.rows:
                few, part = self.small[index], (rows - self.small_rows) / (self.rows - self.small_rows)
                forward_s = max(few.forward_s + part * (block.forward_s - few.forward_s), 0.0)
                backward_s = max(few.backward_s + part * (block.backward_s - few.backward_s), 0.0)
            blocks.append(
                replace(
                    block,
                    forward_s=forward_s,
                    backward_s=backward_s,
                    activation_bytes=int(block.activation_bytes * share),
                    live_bytes=int(block.live_bytes * share),
                )
            )
        return tuple(blocks)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted time and memory of a step.

    Attributes:
        together_bytes: The memory of the whole blocks that FullyShard has gathered at one time.
        bubble: The fraction of the step in which a pipeline's workers are idle.
        sent_bytes: The bytes that each worker sends.
        reason: Why the layout is impossible, or "".
    """

    name: str
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0
    together_bytes: float = 0.0
    step_s: float = 0.0
    bubble: float = 0.0
    sent_bytes: float = 0.0
    reason: str = ""

    @property
    def memory_bytes(self) -> float:
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.activation_bytes + self.together_bytes


def candidates(workers: int) -> list[Joinable]:
    """Return the strategies that Paceline forecasts for this number of workers.

    These are DataParallel, FullyShard, PipelineParallel and TensorParallel, and one of the first two @ one of the others.
    """
    single = DataParallel(workers), FullyShard(workers), PipelineParallel(workers), TensorParallel(workers)
    pairs = [(size, workers // size) for size in range(2, workers) if workers % size == 0]
    outer, inner = (DataParallel, FullyShard), (PipelineParallel, TensorParallel)
    return [*single, *(of(size) @ into(other) for size, other in pairs for into in inner for of in outer)]


def forecast(measured: Measured, layout: Layout, microbatches: int, at_once: int, name: str = "") -> Forecast:
    """Predict time and memory of a step in this layout.

    `microbatches` is the number in a step, `at_once` the number that go through a pipeline together.
    """
    name = name or str(layout)
    blocks = measured.at(measured.all_rows / layout.replicas)
    bandwidth = measured.bandwidth_bytes_s
    if layout.pipe > 1:
        return _piped(measured, blocks, layout, microbatches, at_once, name)
    whole = float(parameter_bytes(blocks))
    part = 1.0 - measured.cut_share * (1 - 1 / layout.tensor) - measured.expert_share * (1 - 1 / layout.expert)
    weights = whole * part / layout.shard
    gradients = weights * measured.trained_share
    compute_s = sum(block.cost_s for block in blocks) * part / layout.context
    sent = _replicas(measured, whole * part, layout, microbatches)
    live = microbatches * sum(block.live_bytes for block in blocks)
    sums = layout.tensor * layout.expert
    # Add each block's messages: four sums of its input with tensor or expert parallelism, or gathered keys, values and gradients.
    sent += live * 4 * (2 * (sums - 1) / sums + (layout.context - 1) / layout.context)
    sent += 2 * (layout.context - 1) / layout.context * gradients
    return Forecast(
        name=name,
        parameter_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=gradients * measured.optimizer_factor,
        activation_bytes=sum(block.activation_bytes for block in blocks) / layout.context,
        together_bytes=WHOLE_BLOCKS * measured.unit_bytes * part if layout.shard > 1 else 0.0,
        step_s=microbatches * compute_s + sent / bandwidth + gradients * measured.optimizer_s_a_byte,
        sent_bytes=sent,
    )


def _replicas(measured: Measured, whole: float, layout: Layout, microbatches: int) -> float:
    data = 2 * (layout.data - 1) / layout.data * whole * measured.trained_share / layout.shard
    # FSDP2 sends three messages per microbatch: one gathers parameters before each of two passes, one reduce-scatters gradients.
    return data + 3 * microbatches * (layout.shard - 1) / layout.shard * whole


def _piped(
    measured: Measured, blocks: Sequence[Block], layout: Layout, microbatches: int, at_once: int, name: str
) -> Forecast:
    if at_once < layout.pipe:
        return Forecast(name=name, reason=f"microbatches={layout.pipe} or more for {layout.pipe} stages")
    if measured.reason:
        return Forecast(name=name, reason=measured.reason)
    if layout.tensor > 1:
        return Forecast(name=name, reason="a pipeline's stages can't be cut into tensor parts")
    stages = layout.pipe * layout.chunks
    try:
        plan = find_cuts(
            blocks,
            stages,
            schedule=layout.schedule,
            workers=layout.pipe,
            microbatches=at_once,
            bandwidth_bytes_s=measured.bandwidth_bytes_s,
        )
    except ParallelError:
        return Forecast(name=name, reason=f"the model has {len(blocks)} blocks to cut between")
    parts = plan.parts(blocks)
    rows = []
    forward_s = [sum(block.forward_s for block in part) for part in parts]
    backward_s = [sum(block.backward_s for block in part) for part in parts]
    for stage, part in enumerate(parts):
        held = float(parameter_bytes(part))
        gradients = held * measured.trained_share / layout.shard
        kept = in_flight(layout.schedule, stage, stages, layout.pipe, at_once)
        ends = part[0].live_bytes * (stage > 0) + (parts[stage + 1][0].live_bytes if stage + 1 < stages else 0)
        rows.append(
            Forecast(
                name=name,
                parameter_bytes=held / layout.shard,
                gradient_bytes=gradients,
                optimizer_bytes=gradients * measured.optimizer_factor,
                activation_bytes=kept * sum(block.activation_bytes for block in part),
                # With FullyShard a stage keeps its parameters gathered, and its gradients whole, until its last microbatch.
                together_bytes=2 * held if layout.shard > 1 else 0.0,
                sent_bytes=microbatches * ends + _replicas(measured, held, layout, 1),
            )
        )
    events = simulate(
        layout.schedule,
        layout.pipe,
        at_once,
        layout.chunks,
        forward=lambda stage: forward_s[stage],
        backward=lambda stage: backward_s[stage],
    )
    compute_s = max(event.end for event in events) * microbatches / at_once
    fullest = max(rows, key=lambda row: row.memory_bytes)
    most_sent = max(row.sent_bytes for row in rows)
    learning_s = max(row.gradient_bytes for row in rows) * measured.optimizer_s_a_byte
    return replace(
        fullest,
        step_s=compute_s + most_sent / measured.bandwidth_bytes_s + learning_s,
        bubble=bubble(layout.schedule, layout.pipe, at_once, layout.chunks),
        sent_bytes=most_sent,
    )


def all_forecasts(
    measured: Measured, workers: int, microbatches: int, at_once: int, used: Layout | None = None
) -> dict[str, tuple[Joinable, Forecast]]:
    """Return layout's name -> (strategy, forecast) for all `candidates`, and for `used`, the training's present layout."""
    layouts = [(strategy, resolve(strategy, workers)) for strategy in candidates(workers)]
    if used is not None:
        # If a candidate differs only in its settings, such as the schedule of a pipeline, the present layout replaces it.
        layouts.append((strategy_of(used), used))
    return {
        (name := shown(strategy)): (strategy, forecast(measured, layout, microbatches, at_once, name))
        for strategy, layout in layouts
    }


def name_of_layout(layout: Layout) -> str:
    """Return a layout's key in `all_forecasts`, such as "DataParallel(2)"."""
    return shown(strategy_of(layout))


def table(forecasts: Sequence[Forecast], limit_bytes: float | None, chosen: str) -> list[str]:
    """Return lines of a table of forecasts, fastest first, impossible layouts last.

    The table marks the layout named `chosen` by "*", and layouts that need more than `limit_bytes` by "-".
    """
    head: tuple[str, ...] = ("", "layout", "parameters", "gradients", "optimizer", "activations", "blocks whole")
    head += ("memory", "step", "bubble", "sent")
    rows = [head]
    fits = [one for one in forecasts if not one.reason]
    for one in sorted(fits, key=lambda one: one.step_s):
        too_much = limit_bytes is not None and one.memory_bytes > limit_bytes
        rows.append(
            (
                "*" if one.name == chosen else "-" if too_much else "",
                one.name,
                *(
                    shown_bytes(count)
                    for count in (
                        one.parameter_bytes,
                        one.gradient_bytes,
                        one.optimizer_bytes,
                        one.activation_bytes,
                        one.together_bytes,
                        one.memory_bytes,
                    )
                ),
                f"{1e3 * one.step_s:.1f} ms",
                f"{100 * one.bubble:.0f} %",
                shown_bytes(one.sent_bytes),
            )
        )
    return aligned(rows) + [f"   {one.name}: not possible: {one.reason}" for one in forecasts if one.reason]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad the cells of a table, and return its lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
