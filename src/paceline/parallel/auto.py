"""The layout that "auto" takes: a small rule, with its reason in numbers. Loaded on use: it imports torch.

    1  one worker                                              DataParallel()
    2  weights, gradients, optimizer and activations fit       DataParallel()         the fastest where it fits
    3  they fit once weights, gradients and optimizer are cut  FullyShard()
    4  they fit with a microbatch's activations at a time      PipelineParallel()
    5  nothing fits                                            an error, with what is missing

Never TensorParallel(): it sends the most, and what it costs depends on a link that nobody has measured.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Parts
from paceline.parallel.batches.microbatches import split
from paceline.parallel.batches.rows import Rows, move, unwrap
from paceline.parallel.check import unchanged
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import from_first, gather
from paceline.parallel.large.parts import is_empty
from paceline.parallel.large.stand_ins import stand_ins
from paceline.parallel.mesh import WorldPlace
from paceline.parallel.randomness import generators
from paceline.parallel.replicas.shard import find_units
from paceline.parallel.strategy import DataParallel, FullyShard, PipelineParallel
from paceline.parallel.task import Task

#: What may be planned with; the rest is for buckets, the allocator's gaps and the loader. A guess.
USABLE = 0.8


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of one step of the whole model, in bytes and seconds; activations and time of the whole batch, or None.

    fixed_bytes: weights, gradients and optimizer states. unit_bytes: the largest block's weights.
    """

    fixed_bytes: int
    unit_bytes: int
    activation_bytes: int | None
    step_s: float | None


def choose(
    task: Task, optimizer: torch.optim.Optimizer | None, sample: Any, place: WorldPlace, memory_bytes: int | None
) -> tuple[Any, str]:
    """The strategy and the reason in one sentence, the same on every rank. Called on all ranks.

    sample: a global batch, or None: then activations are not known and count as nothing.

    Raises:
        ParallelError: the model fits on the workers in no way.
    """
    if place.size == 1:
        return DataParallel(), "DataParallel(): there is one worker."
    found: Any = None
    # The weights lie there already and are among the needs, so what they take counts as available.
    own = memory_bytes or available_bytes(place.device) + sum(map(_size, task.model.parameters()))
    # Every worker holds as much, so the one with the least memory decides.
    least, failed = int(min(gather(own))), None
    if place.rank == 0:
        try:
            needs = measure(task, optimizer, sample, place, least)
            found = decide(needs, place.size, least, task.microbatches)
        except Exception as error:
            # Raised only when the others have been told, for they wait for the answer.
            failed = error
    told = None if failed is None else str(failed) if isinstance(failed, ParallelError) else _described(failed)
    answer, message = from_first((found, told), (DataParallel, FullyShard, PipelineParallel))
    if failed is not None:
        raise failed
    if message is not None:
        raise ParallelError(message)
    strategy, reason = answer
    return strategy, reason


def _described(error: Exception) -> str:
    return f"strategy='auto': the pass over one batch failed on rank 0: {type(error).__name__}: {error}"


def decide(needs: Needs, workers: int, memory_bytes: int, microbatches: int) -> tuple[Any, str]:
    """The strategy and its reason, from these numbers alone.

    Raises:
        ParallelError: nothing fits.
    """
    usable = int(USABLE * memory_bytes)
    activations = needs.activation_bytes or 0
    whole = needs.fixed_bytes + activations // workers
    cut = needs.fixed_bytes // workers + needs.unit_bytes + activations // workers
    # With 1F1B the first stage holds the activations of as many microbatches as there are stages, for 1/stages of the
    # model.
    piped = needs.fixed_bytes // workers + activations // microbatches
    room = f"{_text(usable)} of the {_text(memory_bytes)} that each of the {workers} workers has may be planned with"
    measured = "" if needs.activation_bytes is None else f", {_text(activations)} of activations for the whole batch"
    took = "" if needs.step_s is None else f" One worker takes {needs.step_s * 1000:.0f} ms for the whole batch."
    what = f"{_text(needs.fixed_bytes)} of weights, gradients and optimizer states{measured}"
    if whole <= usable:
        return DataParallel(), f"DataParallel(): {what} need {_text(whole)} on each worker, and {room}.{took}"
    if cut <= usable:
        return FullyShard(), (
            f"FullyShard(): {what} would need {_text(whole)} on each worker, cut in parts {_text(cut)}, and {room}.{took}"
        )
    if piped <= usable and microbatches >= workers:
        return PipelineParallel(), (
            f"PipelineParallel(): {what} would need {_text(whole)} on each worker, fully sharded {_text(cut)}, in stages "
            f"{_text(piped)}, and {room}.{took}"
        )
    more = "" if microbatches >= workers else f", or microbatches={workers} or more for a pipeline"
    raise ParallelError(
        f"strategy='auto': {what} need {_text(whole)} on each worker as replicas, {_text(cut)} fully sharded and {_text(piped)} "
        f"as a pipeline, but {room}. Give more workers, smaller batches{more}."
    )


def measure(
    task: Task, optimizer: torch.optim.Optimizer | None, sample: Any, place: WorldPlace, memory_bytes: int
) -> Needs:
    """The needs of a step, measured by one forward and backward pass over a few rows; the model is left as it was."""
    params = list(task.model.parameters())
    weights = sum(map(_size, params))
    trained = sum(_size(param) for param in params if param.requires_grad)
    fixed = weights + trained * (1 + _states(optimizer))
    units = [task.model.get_submodule(name) for name in find_units(task.model)]
    unit = max((sum(map(_size, part.parameters())) for part in units), default=weights)
    activations = seconds = None
    # Weights and gradients that don't fit would bring the kernel's out-of-memory killer, and no answer.
    empty = is_empty(task.model)
    if sample is not None and (empty or weights + trained < memory_bytes):
        with stand_ins(task.model, place.device):
            activations, seconds = _pass(task, split(sample, task), place.device, backward=not empty)
    return Needs(fixed_bytes=fixed, unit_bytes=unit, activation_bytes=activations, step_s=seconds)


def available_bytes(device: torch.device) -> int:
    """The bytes that this process may still take, if the other processes of this machine take as much."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    local = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    free = [_meminfo()]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        # What version 2 of cgroups writes where there is no limit.
        if limit.read_text().strip() != "max":
            free.append(int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):
        pass
    # Those are of the machine, which its workers share; this one is the process's own.
    return min(max(min(free), 0) // local, _left_of_limit())


def _left_of_limit() -> int:
    """What `ulimit -d` leaves this process; without a limit, more than any machine has."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return 2**63
    try:
        status = Path("/proc/self/status").read_text()
        used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return limit
    return max(limit - used, 0)


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            # MemFree leaves out the cache, which the kernel gives back where memory is asked for.
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Without /proc (not Linux), half of all memory counts as free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _pass(task: Task, parts: Parts, device: torch.device, *, backward: bool) -> tuple[int, float | None]:
    """Bytes that are saved for the backward pass, without the weights, and seconds, of the whole batch.

    backward: make that pass too; gradients take as much memory as the weights. Without it no time is measured.
    """
    rows = Rows(parts)
    few = max(rows.count // task.microbatches, 1)
    piece: Parts = unwrap(move(rows.take(0, few), device))
    own = {param.untyped_storage().data_ptr() for param in task.model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # By storage, for several tensors that are saved may be views of one.
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = [(param, param.grad) for param in task.model.parameters()]
    with generators(0, device), unchanged(task.model):
        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), task.autocast(device):
            loss = task.loss(task.model(*piece.args, **piece.kwargs), piece.target)
        if backward and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        # A GPU goes on computing after the call has returned.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    for param, grad in before:
        param.grad = grad
    return int(sum(saved.values()) * rows.count / few), seconds * rows.count / few if backward else None


def _states(optimizer: torch.optim.Optimizer | None) -> int:
    """The count of numbers that the optimizer keeps for each parameter."""
    if optimizer is None:
        return 0
    name = type(optimizer).__name__.lower()
    if name == "sgd":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    if name in ("adagrad", "rprop", "rmsprop", "adafactor", "muon", "lion"):
        return 1
    return 2 + int(any(group.get("amsgrad") for group in optimizer.param_groups))


def _size(tensor: nn.Parameter) -> int:
    return tensor.numel() * tensor.element_size()


def _text(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
