"""The cut of a model into pipeline stages, which the first rank decides for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError
from paceline.parallel.loss_state import LossReads, attributes_of, loss_kept
from paceline.parallel.mesh import World, decide
from paceline.parallel.pipeline.costs import measure
from paceline.parallel.pipeline.cut import Block, Plan, find_cuts, plan_by_hand
from paceline.parallel.pipeline.programs import Programs
from paceline.parallel.task import Task
from paceline.parallel.tied_parameters import all_names, held_tensors
from paceline.parallel.tracing.boundaries import Boundaries, Mark
from paceline.parallel.tracing.source import shown


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePlan:
    """The stages of a pipeline, with the costs from which the cut was chosen.

    Attributes:
        marks: For each stage but the first: the module call with which it begins.
        blocks: The measured blocks.
        plan: The cut into stages.
        uses: The names of each stage's modules, parameters and buffers.
        loss_dtype: The dtype of the weighted loss.
    """

    marks: tuple[Mark, ...]
    blocks: tuple[Block, ...]
    plan: Plan
    uses: tuple[frozenset[str], ...]
    loss_dtype: torch.dtype

    @property
    def stages(self) -> int:
        return len(self.marks) + 1


#: Rank 0's decision: the marks (where stages begin), the blocks, the plan, the loss's dtype, and the tensors that the loss reads.
_Decision = tuple[tuple[Mark, ...], tuple[Block, ...], Plan, torch.dtype, list[str]]


class _Options(TypedDict):
    schedule: str
    workers: int
    microbatches: int


def agree(task: Task, world: World, sample: Microbatch, programs: Programs, memory_bytes: int | None) -> StagePlan:
    """Return the first rank's plan of the stages, on every rank.

    Every rank must call this.

    Raises:
        ParallelError: On every rank, with the first rank's reason.
    """
    marks, blocks, plan, loss_dtype, by_loss = decide(
        world, lambda: _decide(task, world, sample, programs, memory_bytes), kinds=(Mark, Block, Plan)
    )
    *others, last = _uses(task, sample, programs, marks)
    # The last stage computes the loss. If the loss reads another stage's parameter, the last stage gets a tied copy.
    added = frozenset(by_loss).difference(held_tensors(task.model, last))
    # Don't count buffers, because each worker has whole buffers.
    parts = added.intersection(name for name, _ in task.model.named_parameters(remove_duplicate=False))
    if parts and world.layout.shard > 1:
        raise ParallelError(
            f"the loss reads {min(parts)} of the model itself, which is in another stage than the loss, and on "
            f"{world.layout} each worker has a part of it. Return what the loss needs from the model's forward, or use "
            "PipelineParallel() with DataParallel() in place of FullyShard()."
        )
    return StagePlan(marks=marks, blocks=blocks, plan=plan, uses=(*others, last | added), loss_dtype=loss_dtype)


def _decide(task: Task, world: World, sample: Microbatch, programs: Programs, memory_bytes: int | None) -> _Decision:
    layout = world.layout
    stages = layout.pipe * layout.chunks
    boundaries = Boundaries(programs.trace(sample))
    marks = boundaries.marks()
    by_hand = [(Mark(name=name), boundaries.find(Mark(name=name))) for name in layout.cut or ()]
    places = [place for _, place in by_hand]
    if layout.cut is not None:
        _check_by_hand(layout.cut, places, layout.pipe, stages)
        of_place = {place: mark for mark, place in (*marks, *by_hand)}
        marks = [(of_place[place], place) for place in sorted(of_place)]
    if len(marks) + 1 < stages:
        names = ", ".join(str(mark) for mark, _ in marks) or "nowhere"
        shut = "".join(f" {name} is one block, for it can't be cut: {why}." for name, why in programs.shut.items())
        raise ParallelError(
            f"{type(task.model).__name__} can be cut into {len(marks) + 1} parts at most (before: {names}), but the pipeline has "
            f"{stages} stages.{shut} Take fewer, or split its forward into more modules, called one after the other."
        )
    seen: list[torch.dtype] = []
    attributes = [tensor for _, tensor in attributes_of(task.model)]
    versions = {name: buffer._version for name, buffer in task.model.named_buffers()}
    by_loss: list[str] = []

    def loss(output: object) -> Tensor:
        if seen:
            return task.weighted_loss(output, sample)
        with LossReads(task.model, attributes) as reads:
            reads.may_read(output, sample.target, sample.weight)
            result = task.weighted_loss(output, sample)
        _check_loss(reads, {name for name, buffer in task.model.named_buffers() if buffer._version != versions[name]})
        by_loss.extend(reads.state)
        seen.append(result.dtype)
        return result

    with loss_kept(task.loss, task.model):
        blocks = measure(task, sample, boundaries, marks, world.device, loss)
    options: _Options = {"schedule": layout.schedule, "workers": layout.pipe, "microbatches": task.at_once}
    if layout.cut is not None:
        # The first block (0) has no mark. So mark n is the beginning of block n + 1.
        starts = [1 + index for index, (_, place) in enumerate(marks) if place in places]
        plan = plan_by_hand(blocks, starts, **options)
    else:
        plan = find_cuts(blocks, stages, memory_bytes=memory_bytes, tied=_tied(blocks), **options)
    return tuple(marks[start - 1][0] for start in plan.starts), blocks, plan, seen[-1], by_loss


def _check_loss(reads: LossReads, changed: set[str]) -> None:
    """Raise if the loss reads tensors that a forward pass stores or changes."""
    left = reads.left | {name: line for name, line in reads.state.items() if name in changed}
    for name, line in left.items():
        raise ParallelError(
            f"the loss reads {name or 'a tensor'} at {shown(line)}, which a call of the model has left there. In a pipeline the "
            "loss is computed by the last stage, and other stages are other processes: return that tensor from the model's "
            "forward, beside the output, and read it from there; or use DataParallel() or FullyShard()."
        )


def _check_by_hand(cut: tuple[str, ...], places: list[int], workers: int, stages: int) -> None:
    if len(cut) != stages - 1:
        each = f" ({stages // workers} for each of {workers} workers)" if stages != workers else ""
        raise ParallelError(
            f"cut={list(cut)} names {len(cut)} modules, which makes {len(cut) + 1} stages, but the pipeline has {stages}{each}. "
            f"Name {stages - 1}: those with which a new stage begins."
        )
    for before, after, name in zip(places, places[1:], cut[1:], strict=False):
        if after <= before:
            raise ParallelError(
                f"cut={list(cut)}: {name!r} is not called after the one before it. Name them in the order of the calls, "
                "each once."
            )


def _tied(blocks: tuple[Block, ...]) -> list[frozenset[int]]:
    """Return the sets of blocks that share a tied parameter, as indices."""
    users: dict[str, set[int]] = {}
    for index, block in enumerate(blocks):
        for name, _ in block.parameters:
            users.setdefault(name, set()).add(index)
    return list({frozenset(own) for own in users.values() if len(own) > 1})


def _uses(task: Task, sample: Microbatch, programs: Programs, marks: tuple[Mark, ...]) -> tuple[frozenset[str], ...]:
    """Return the names of the tensors and modules that each stage holds."""
    used: list[set[str]] = [set() for _ in range(len(marks) + 1)]
    # Trace both training and evaluation mode: forward may call different modules in each, and every module needs a stage.
    for training in (None, False, True):
        try:
            for own, segment in zip(used, programs.segments(sample, training, marks), strict=True):
                own |= set(segment.uses)
        except ParallelError:
            # Ignore an error in the mode that the model is not in. The error occurs again when the model is used in that mode.
            if training is None:
                raise
    held = {name for own in used for name in held_tensors(task.model, frozenset(own))}
    # Modules that no stage calls are still in the model's state and optimizer, so the first stage holds them.
    used[0] |= {name for name, _ in all_names(task.model)} - held
    return tuple(map(frozenset, used))
