"""The executor of a model cut into stages on several workers.

    trace -> boundaries -> costs -> cut -> segments -> stages -> schedule

The executor computes the same results as one process that accumulates gradients over the same microbatches. So
BatchNorm sees one microbatch at a time. Dropout draws from a separate random stream in each stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch, with_rows
from paceline.parallel.batches.microbatches import TAGS
from paceline.parallel.errors import ParallelError
from paceline.parallel.failure import at_microbatch
from paceline.parallel.guards import refuse_calls
from paceline.parallel.large.meta_parameters import give_memory
from paceline.parallel.mesh import World
from paceline.parallel.pipeline.plan import StagePlan, agree
from paceline.parallel.pipeline.programs import Programs
from paceline.parallel.pipeline.schedules import StageMessages, check_microbatches, run
from paceline.parallel.pipeline.stages import Stage, StageModule, Turn
from paceline.parallel.pytree import tensors_in
from paceline.parallel.reduce import sum_gradients
from paceline.parallel.replicas import normalization, shard
from paceline.parallel.replicas.shard_used import Used
from paceline.parallel.task import Task
from paceline.parallel.tied_parameters import StageTies, first_names, owner_of
from paceline.parallel.tracing.segments import joined, stage_module


def build(task: Task, world: World, sample: Microbatch, *, memory_bytes: int | None = None) -> Pipelined:
    """Cut the model, and return the executor of this rank's stages.

    Every rank must call this.

    Args:
        task: The model and its loss.
        world: This rank, with the process groups of its layout.
        sample: A typical microbatch, with which the first rank measures the blocks.
        memory_bytes: The memory of one worker for parameters, gradients, optimizer and activations. None sets no limit.

    Raises:
        ParallelError: The model cannot be cut into this many stages, or the schedule does not accept the microbatches.
    """
    layout = world.layout
    if layout.tensor > 1:
        raise ParallelError(
            f"{layout}: a pipeline's stages can't be cut into tensor parts too. Use FullyShard() @ PipelineParallel(), or "
            "TensorParallel() with DataParallel()."
        )
    check_microbatches(layout.schedule, layout.pipe, task.at_once)
    with normalization.alone(task.model):
        programs = Programs(task, world.device, sample, layout.pipe * layout.chunks, layout.cut or ())
        plan = agree(task, world, sample, programs, memory_bytes)
    return Pipelined(task, world, programs, plan)


class Pipelined:
    """An object that computes this worker's stages of a pipeline in each step."""

    def __init__(self, task: Task, world: World, programs: Programs, plan: StagePlan) -> None:
        self._task = task
        self._world = world
        self._programs = programs
        self.plan = plan
        self._group = world.group("pipe")
        self._workers = world.extent("pipe")
        self._own = tuple(range(world.coordinate("pipe"), plan.stages, self._workers))
        names = first_names(task.model)
        self.ties = StageTies(task.model, plan.uses, world)
        if world.layout.shard > 1:
            self._check_shards()
        self._modules = [stage_module(task.model, plan.uses[index], StageModule) for index in self._own]
        if world.layout.shard == 1:
            give_memory(world.device, *self._modules)
        self._names = [
            (names[name], *owner_of(module, name))
            for module in self._modules
            for name, _ in module.named_parameters(remove_duplicate=False)
        ]
        self._used = [self._sharded(module) for module in self._modules] if world.layout.shard > 1 else []
        self._module: nn.Module = self._modules[0]
        if len(self._modules) > 1:
            # Join the stages in a new module instead of using the model, because FullyShard replaces only the stages' parameters.
            held = [plan.uses[index] for index in self._own]
            self._module = joined(task.model, zip(self._modules, held, strict=True))
        self.program = 0
        self.written: dict[str, float] = {}
        self._trained = {name: param.requires_grad for name, param in self.named_parameters().items()}
        self._messages = StageMessages(self._group, world.device)
        self._stages = [
            Stage(module, index, plan.stages) for index, module in zip(self._own, self._modules, strict=True)
        ]
        # Release the memory of the stages on other ranks, which the tracer needed until now.
        programs.forget()
        _let_go(task.model, self._modules)
        used = frozenset[str]().union(*plan.uses)
        #: A tuple for each buffer that a stage uses: the buffer's name, its module, its attribute in the module, and the tensor.
        self._buffers = [
            (name, *owner_of(task.model, name), buffer) for name, buffer in task.model.named_buffers() if name in used
        ]
        refuse_calls(task.model)

    @property
    def module(self) -> nn.Module:
        return self._module

    def named_parameters(self) -> dict[str, nn.Parameter]:
        params: dict[str, nn.Parameter] = {}
        for name, owner, last in self._names:
            param = owner._parameters[last]
            assert param is not None
            params.setdefault(name, param)
        return params

    def train_step(self, micros: Sequence[Microbatch]) -> Tensor:
        # Refuse a model that was changed after the cut: a changed stage could send messages that the next stage does not expect.
        self._check_trained()
        self._check_buffers()
        self._programs.refresh()
        micros = with_rows(micros)
        traced = self._programs.trace(micros[0], self._module.training)
        # Compute the digest before the stages run, because they may change a tensor whose values are a part of the digest.
        tag = traced.digest % TAGS
        losses: list[Tensor] = []
        for first in range(0, len(micros), self._task.at_once):
            some = micros[first : first + self._task.at_once]
            self._begin(some, self._task.weighted_loss)
            losses += [loss for _, loss in run(self._world.layout.schedule, self._stages, len(some), self._messages)]
        # One message sums the loss, which only the last stage has, and numbers that show whether all stages have traced the same
        # graph: n numbers are equal if n * (sum of squares) equals the square of their sum.
        means = self._task.means
        sums = torch.tensor([0.0, tag, tag * tag, *means.numbers()], dtype=torch.float64, device=self._world.device)
        if losses:
            sums[0] = torch.stack([loss.detach() for loss in losses]).sum()
        dist.all_reduce(sums, group=self._group)
        if self._task.loss_weight is None and len(micros) * self._world.replicas > 1:
            means.fill(sums[3:].tolist())
        self.program = traced.digest
        # On a GPU skip the comparison of the graphs, because the host would have to wait for the sums.
        if self._world.replicas > 1 and sums.device.type == "cpu":
            is_one = int(sums[2]) * self._workers == int(sums[1]) ** 2
            # Between replicas compare only the values that the graphs read, because the graphs contain each replica's number of
            # rows. If stages have traced different graphs, each rank uses its own negative number, so that the comparison fails.
            self.program = traced.reads.digest if is_one else -1 - self._world.rank
        return sums[0].to(self.plan.loss_dtype)

    def finish_gradients(self) -> None:
        group = self._world.replica_group
        params = self.named_parameters()
        if self._world.layout.shard > 1:
            # FSDP2 has summed its shards' gradients in the last backward pass. Sum only gradients of parameters that are whole.
            for used in self._used:
                used.finish()
            sum_gradients([param for module in self._modules for param in shard.left_whole(module)], group)
        else:
            sum_gradients(params.values(), group)
        # Sum tied parameters over the stages last, so that all copies get exactly the same gradient.
        self.ties.sum_gradients(params)

    def predict(self, micros: Sequence[Microbatch], consume: Callable[[object, Microbatch], Tensor]) -> Tensor:
        micros = with_rows(micros)
        device, parts = self._world.device, []
        self._programs.refresh()
        self._begin(micros)
        for index, output in run("forward", self._stages, len(micros), self._messages):
            with at_microbatch(micros[index].index):
                parts.append(consume(output, micros[index]).to(device, torch.float64).reshape(-1))
        # Only the last stage calls the metric and knows how many values it returns. So its worker sends this number first.
        size = self._from_last(torch.tensor(parts[0].numel() if parts else -1, device=device))
        parts = parts or [torch.empty(int(size), dtype=torch.float64, device=device)]
        return self._from_last(functools.reduce(torch.add, parts))

    def train(self, mode: bool = True) -> None:
        for module in (*self._modules, self._module):
            module.train(mode)

    def begin_anew(self) -> None:
        for used in self._used:
            used.begin_anew()

    def _check_shards(self) -> None:
        for name, stages in self.ties.holders.items():
            if len({stage % self._workers for stage in stages}) < len(stages):
                raise ParallelError(
                    f"{name} is in the stages {', '.join(map(str, stages))}, some of them on one worker, and FullyShard can't "
                    "have it in two. Take schedule='1f1b', or cut where its uses stay together (PipelineParallel(cut=[...]))."
                )

    def _sharded(self, module: nn.Module) -> Used:
        shard.shard_stage(module, self._world)
        # Use `find_unused`, because any step may leave a parameter unused.
        used = Used(module, self._world, find_unused=True)
        # Before FSDP2's hook, `settle` frees parameters that FSDP2 gathered too early, so FSDP2 gathers current values.
        module.register_forward_pre_hook(lambda *_: used.settle(), prepend=True)
        module.register_forward_hook(lambda *_: used.watch())
        return used

    def _begin(
        self, micros: Sequence[Microbatch], finish: Callable[[object, Microbatch], Tensor] | None = None
    ) -> None:
        """Prepare the stages for a training step, or for a prediction.

        `finish`: (output, microbatch) -> weighted loss, or None for a prediction.
        """
        turns = [self._turns(micro, finish) for micro in micros]
        for stage, own in zip(self._stages, zip(*turns, strict=True), strict=True):
            stage.begin(own, trains=finish is not None)

    def _turns(self, micro: Microbatch, finish: Callable[[object, Microbatch], Tensor] | None) -> list[Turn]:
        """Return a microbatch's pass through each of this rank's stages.

        `finish`: (output, microbatch) -> the weighted loss, for the last stage. None returns the output.
        """
        # Read the training mode in each call, because a script may change it with `par.module.eval()`.
        training = self._module.training
        segments = self._programs.segments(micro, training, self.plan.marks)
        for index in self._own:
            missing = set(segments[index].uses) - self.plan.uses[index]
            if missing:
                since = f", or since {self._programs.changed} was changed" if self._programs.changed else ""
                raise ParallelError(
                    f"stage {index} needs {', '.join(sorted(missing))}, which it doesn't hold: for a batch of this shape, in "
                    f"this mode (training={training}){since}, the model's forward takes another way than for the first batch. "
                    "Put that choice into one block, or cut elsewhere (PipelineParallel(cut=[...]))."
                )
        last = self.plan.stages - 1
        batch = tensors_in((micro.args, micro.kwargs))
        return [
            Turn(
                segment=segments[index],
                micro=micro,
                batch=batch,
                context=self._context,
                finish=finish if index == last else None,
            )
            for index in self._own
        ]

    def _context(self) -> AbstractContextManager[object]:
        return self._task.autocast(self._world.device)

    def _from_last(self, value: Tensor) -> Tensor:
        dist.broadcast(value, group=self._group, group_src=(self.plan.stages - 1) % self._workers)
        return value

    def _check_trained(self) -> None:
        for name, param in self.named_parameters().items():
            if param.requires_grad != self._trained[name]:
                raise ParallelError(
                    f"{name}.requires_grad is {param.requires_grad} now, but was {self._trained[name]} when the model was cut; "
                    "the stages before it would not hear of it. Freeze or unfreeze first, then call parallelize."
                )

    def _check_buffers(self) -> None:
        for name, owner, last, buffer in self._buffers:
            if owner._buffers.get(last) is not buffer:
                raise ParallelError(
                    f"another tensor was put in the place of the buffer {name} after the model was cut, and no stage would "
                    f"see it. Change it in place (model.{name}.copy_(new)), or make it a plain attribute in place of a "
                    "registered buffer: that is followed."
                )


def _let_go(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Release the memory of tensors that this rank's stages do not use."""
    parts = {id(part) for module in modules for part in module.modules()}
    tensors = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    shapes: dict[int, nn.Parameter] = {}
    empty: dict[int, Tensor] = {}
    for part in (part for part in model.modules() if id(part) not in parts):
        for name, param in part._parameters.items():
            if param is not None and id(param) not in tensors:
                shape = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                part._parameters[name] = shapes.setdefault(id(param), shape)
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in tensors:
                part._buffers[name] = empty.setdefault(id(buffer), buffer.to("meta"))
