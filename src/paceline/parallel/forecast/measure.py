"""Measure time and memory of a model's blocks, to forecast a step under each layout."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError
from paceline.parallel.experts import expert_parameters
from paceline.parallel.forecast.predict import Measured
from paceline.parallel.large.meta_parameters import stand_ins
from paceline.parallel.loss_state import loss_kept
from paceline.parallel.pipeline.costs import measure, now, saved_by
from paceline.parallel.pipeline.cut import BANDWIDTH_BYTES_S, Block
from paceline.parallel.pipeline.programs import Programs
from paceline.parallel.pytree import tensors_in
from paceline.parallel.replicas import normalization
from paceline.parallel.replicas.shard import find_units
from paceline.parallel.task import Task
from paceline.parallel.tracing.boundaries import Boundaries
from paceline.parallel.tracing.fake_model import untouched

#: The number of values in the parameter with which the optimizer's step is timed.
_NUMBERS = 2**20
#: The size in bytes of the message with which the bandwidth between workers is measured.
_MESSAGE_BYTES = 4 * 2**20


def measured(
    model: nn.Module,
    task: Task,
    micros: Sequence[Microbatch],
    device: torch.device,
    optimizer: torch.optim.Optimizer | None,
    *,
    bandwidth_bytes_s: float = BANDWIDTH_BYTES_S,
) -> Measured:
    """Measure time and memory of the model's blocks.

    Without microbatches only the sizes of the parameters are measured. The model is left unchanged.
    """
    task = dataclasses.replace(task, model=model)
    reason = "" if micros else "it was not traced, for want of a batch"
    # Without a batch, the whole model counts as one block. Its parameters' sizes are known, but its times are unknown.
    blocks: list[tuple[Block, ...]] = [
        (Block(name="the model", forward_s=0.0, backward_s=0.0, parameters=_sizes(model)),)
    ]
    with normalization.alone(model), loss_kept(task.loss, model):
        try:
            blocks = [_blocks(task, micro, device) for micro in micros] or blocks
        except ParallelError as error:
            reason = f"it can't be cut into stages ({str(error).partition('. ')[0]})"
            blocks = [(_whole(task, micro, device),) for micro in micros]
    params = list(model.parameters())
    whole = _bytes_of(params) or 1
    trained = _bytes_of(param for param in params if param.requires_grad)
    matrices = _bytes_of(param for param in params if param.dim() > 1)
    units = [model.get_submodule(name) for name in find_units(model)]
    # If the optimizer can't be tried, assume that it keeps two numbers for each number of a parameter, as Adam does.
    factor, seconds = _tried(optimizer, device, _NUMBERS) or (2, 0.0)
    about = Measured(
        rows=max(micros[0].rows, 1) if micros else 1,
        all_rows=micros[0].global_rows if micros else 1,
        blocks=blocks[0],
        trained_share=trained / whole,
        unit_bytes=max((_bytes_of(part.parameters()) for part in units), default=whole),
        optimizer_factor=factor,
        optimizer_s_a_byte=seconds,
        cut_share=matrices / whole,
        expert_share=_bytes_of(expert_parameters(model)) / whole,
        bandwidth_bytes_s=bandwidth_bytes_s,
        reason=reason,
    )
    if micros[1:] and len(blocks[0]) == len(blocks[1]):
        about = dataclasses.replace(about, small_rows=micros[1].rows, small=blocks[1])
    return about


def _blocks(task: Task, micro: Microbatch, device: torch.device) -> tuple[Block, ...]:
    boundaries = Boundaries(Programs(task, device, micro, stages=4).trace(micro))
    return measure(
        task, micro, boundaries, boundaries.marks(), device, lambda output: task.weighted_loss(output, micro)
    )


def _whole(task: Task, micro: Microbatch, device: torch.device) -> Block:
    """Measure a model that cannot be traced, as a single block."""
    model = task.model

    def forward() -> Tensor:
        with task.autocast(device):
            return task.weighted_loss(model(*micro.args, **micro.kwargs), micro)

    with stand_ins(model, device), untouched(model):
        # Use a separate pass to measure how many bytes autograd saves. Its memory is free again when the timed pass begins.
        saved = saved_by(forward, model)[1]
        params = [param for param in model.parameters() if param.requires_grad]
        start = now()
        loss = forward()
        middle = now()
        if loss.requires_grad:
            torch.autograd.grad(loss, params, allow_unused=True)
        end = now()
    return Block(
        name="the model",
        forward_s=middle - start,
        backward_s=end - middle,
        parameters=_sizes(model),
        activation_bytes=saved,
        live_bytes=sum(tensor.nbytes for tensor in tensors_in((micro.args, micro.kwargs))),
    )


def _tried(optimizer: torch.optim.Optimizer | None, device: torch.device, numbers: int) -> tuple[int, float] | None:
    """Measure a step of the optimizer's class on a parameter of `numbers` numbers.

    Return (state values for each number, seconds per byte of the parameter), or None if a step fails.
    """
    if optimizer is None:
        return 0, 0.0
    param = nn.Parameter(torch.zeros(numbers // 32, 32, device=device))
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    # A parameter group may have settings that the optimizer's constructor does not accept, so leave these settings out.
    taken = inspect.signature(make).parameters
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params" and key in taken}
    try:
        own = make([param], **options)
        best = float("inf")
        for _ in range(3):
            param.grad = torch.ones_like(param)
            start = now()
            own.step()
            best = min(best, now() - start)
        state = own.state.get(param, {})
    except Exception:
        # Return None if the optimizer can't be created or can't step, for example because its constructor needs more arguments.
        return None
    kept = sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim())
    return round(kept / param.numel()), best / param.nbytes


def state_numbers(optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Return how many values the optimizer keeps for each number of a parameter.

    The result is 2, as for Adam, if a trial step fails.
    """
    numbers = tried_state_numbers(optimizer, device)
    return 2 if numbers is None else numbers


def tried_state_numbers(optimizer: torch.optim.Optimizer | None, device: torch.device) -> int | None:
    """Return the measured result of `state_numbers`, or None if the trial fails."""
    numbers = _tried(optimizer, device, 1024)
    return None if numbers is None else numbers[0]


def bandwidth(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Measure each rank's bytes per second in an all-reduce. Every rank must call it."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return BANDWIDTH_BYTES_S
    message = torch.zeros(_MESSAGE_BYTES // 4, device=device)
    times = []
    for _ in range(4):
        dist.barrier(group)
        start = now()
        dist.all_reduce(message, group=group)
        times.append(now() - start)
    return 2 * (ranks - 1) / ranks * _MESSAGE_BYTES / sorted(times)[1]


def _sizes(model: nn.Module) -> tuple[tuple[str, int], ...]:
    return tuple((name, param.nbytes) for name, param in model.named_parameters())


def _bytes_of(params: Iterable[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params)
