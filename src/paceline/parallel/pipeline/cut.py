"""The cuts of a sequence of blocks that make the slowest stage as fast as possible.

This is the min-max partition of a sequence by dynamic programming, in O(stages * blocks^2): the least maximum for the first j
blocks in k stages is the minimum over i of max(least maximum for the first i blocks in k - 1 stages, cost of blocks i..j).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.timeline import in_flight

#: The assumed bandwidth between two workers in bytes per second: a guess that only decides between cuts of similar cost.
BANDWIDTH_BYTES_S = 2e9

#: Training needs this many times the memory of a parameter: for the parameter, its gradient and Adam's two moments.
STATE_FACTOR = 4

#: A tied parameter stays in one stage if a step then takes at most this many times as long as with copies in several stages.
TIE_SLACK = 1.05


@dataclass(frozen=True, kw_only=True)
class Block:
    """The cost of a block of the model for one microbatch.

    Attributes:
        live_bytes: The size of the tensors that a stage must receive if it begins with this block.
        parameters: (first name, bytes) of each parameter.
        activation_bytes: The size of the tensors that the forward pass saves for the backward pass.
    """

    name: str
    forward_s: float
    backward_s: float
    parameters: tuple[tuple[str, int], ...] = ()
    activation_bytes: int = 0
    live_bytes: int = 0

    @property
    def cost_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cut of the model into stages, with the predicted costs of each stage.

    Attributes:
        starts: For each stage but the first: the index of its first block.
        costs_s: The seconds that each stage takes for one microbatch.
        memory_bytes: The memory that each stage needs.
    """

    starts: tuple[int, ...]
    costs_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    @property
    def slowest_s(self) -> float:
        return max(self.costs_s)

    def parts(self, blocks: Sequence[Block]) -> list[Sequence[Block]]:
        return [blocks[first:last] for first, last in pairwise((0, *self.starts, len(blocks)))]


def parameter_bytes(blocks: Sequence[Block]) -> int:
    """Return the size of the blocks' parameters. A tied parameter counts once."""
    return sum(dict(pair for block in blocks for pair in block.parameters).values())


def find_cuts(
    blocks: Sequence[Block],
    stages: int,
    *,
    schedule: str = "1f1b",
    workers: int | None = None,
    microbatches: int = 1,
    memory_bytes: int | None = None,
    tied: Sequence[frozenset[int]] = (),
    bandwidth_bytes_s: float = BANDWIDTH_BYTES_S,
) -> Plan:
    """Return the cut into this many stages that makes the slowest stage fastest.

    Args:
        blocks: The measured blocks.
        stages: The number of stages.
        schedule: The schedule's name.
        workers: The number of workers, if each has several stages ("interleaved"). None: one stage per worker.
        microbatches: The number of microbatches in a step.
        memory_bytes: The memory of one worker. None sets no limit.
        tied: For each tied parameter the indices of its blocks. These blocks stay in one stage if the slowest stage
            then takes at most `TIE_SLACK` times as long.
        bandwidth_bytes_s: Bytes per second between two workers.

    Raises:
        ParallelError: There are fewer blocks than stages, or no cut fits the memory.
    """
    if len(blocks) < stages:
        raise ParallelError(
            f"the model has {len(blocks)} blocks that it can be cut between ({', '.join(block.name for block in blocks)}), "
            f"but the pipeline {stages} stages. Take fewer stages, or split a block into several modules."
        )
    workers = workers or stages
    table = _Table(blocks, schedule, stages, workers, microbatches, bandwidth_bytes_s)
    limit = None if memory_bytes is None else memory_bytes * workers // stages
    best = table.solve(limit, lambda place: True)
    if best is None:
        least = table.solve_memory()
        raise ParallelError(
            f"memory_bytes={memory_bytes}: no cut of the {len(blocks)} blocks into {stages} stages fits; the best needs about "
            f"{least * stages // workers} bytes on one worker (parameters, gradients, Adam's moments and saved activations). "
            "Use more stages, more and smaller microbatches, or FullyShard() @ PipelineParallel()."
        )
    for tie in sorted(tied, key=len):
        # Keep the parameter in one stage: no stage may begin between its first and its last block.
        inside = range(min(tie) + 1, max(tie) + 1)
        kept = table.solve(limit, lambda place, inside=inside: place not in inside)  # type: ignore[misc]
        if kept is not None and kept.slowest_s <= TIE_SLACK * best.slowest_s:
            best = kept
    return best


class _Table:
    def __init__(
        self, blocks: Sequence[Block], schedule: str, stages: int, workers: int, microbatches: int, bandwidth: float
    ) -> None:
        self._blocks = blocks
        self._schedule, self._stages, self._workers, self._microbatches = schedule, stages, workers, microbatches
        self._cost_sums = [0.0, *accumulate(block.cost_s for block in blocks)]
        self._activation_sums = [0, *accumulate(block.activation_bytes for block in blocks)]
        # Count the bytes twice, because the link carries activations forward and their gradients back.
        self._link_s = [2 * block.live_bytes / bandwidth for block in blocks] + [0.0]
        self._parameter_bytes: dict[tuple[int, int], int] = {}

    def cost_s(self, first: int, last: int) -> float:
        link_s = self._link_s[last] + (self._link_s[first] if first else 0.0)
        return self._cost_sums[last] - self._cost_sums[first] + link_s

    def memory(self, stage: int, first: int, last: int) -> int:
        key = first, last
        if key not in self._parameter_bytes:
            self._parameter_bytes[key] = parameter_bytes(self._blocks[first:last])
        kept = in_flight(self._schedule, stage, self._stages, self._workers, self._microbatches)
        activations = self._activation_sums[last] - self._activation_sums[first]
        return STATE_FACTOR * self._parameter_bytes[key] + kept * activations

    def solve(self, limit: int | None, allowed: Callable[[int], bool]) -> Plan | None:
        """Return the cut with the fastest bottleneck stage, or None if impossible.

        Of several cuts that are equally fast, return the one with the least traffic. `limit` is a stage's memory in
        bytes, or None. `allowed(index)` tells whether a stage may begin with this block.
        """
        count, stages = len(self._blocks), self._stages
        nothing = (float("inf"), float("inf"), -1)
        best = [[nothing] * (count + 1) for _ in range(stages + 1)]
        best[0][0] = (0.0, 0.0, -1)
        for stage in range(stages):
            for last in range(stage + 1, count + 1):
                for first in range(stage, last):
                    if (
                        best[stage][first] is nothing
                        or (first and not allowed(first))
                        or (limit is not None and self.memory(stage, first, last) > limit)
                    ):
                        continue
                    slowest_s, carried_s, _ = best[stage][first]
                    candidate = (max(slowest_s, self.cost_s(first, last)), carried_s + self._link_s[first], first)
                    best[stage + 1][last] = min(best[stage + 1][last], candidate)
        if best[stages][count] is nothing:
            return None
        starts = [count]
        for stage in range(stages, 0, -1):
            starts.append(best[stage][starts[-1]][2])
        return self.plan(starts[::-1])

    def plan(self, ends: Sequence[int]) -> Plan:
        parts = list(pairwise(ends))
        return Plan(
            starts=tuple(ends[1:-1]),
            costs_s=tuple(self.cost_s(first, last) for first, last in parts),
            memory_bytes=tuple(self.memory(stage, first, last) for stage, (first, last) in enumerate(parts)),
        )

    def solve_memory(self) -> int:
        count, stages = len(self._blocks), self._stages
        best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
        best[0][0] = 0
        for stage in range(stages):
            for last in range(stage + 1, count + 1):
                best[stage + 1][last] = min(
                    max(best[stage][first], self.memory(stage, first, last)) for first in range(stage, last)
                )
        return int(best[stages][count])


def plan_by_hand(
    blocks: Sequence[Block], starts: Sequence[int], *, schedule: str, workers: int, microbatches: int
) -> Plan:
    """Predict the costs of pipeline stages that the user has chosen.

    `starts` has the index of each stage's first block, except for the first stage.
    """
    table = _Table(blocks, schedule, len(starts) + 1, workers, microbatches, BANDWIDTH_BYTES_S)
    return table.plan([0, *starts, len(blocks)])
