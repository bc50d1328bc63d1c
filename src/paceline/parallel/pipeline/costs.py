"""The cost of each block of a model on this machine, measured on one microbatch.

Each block runs alone on the previous block's output. The first run counts the bytes that the block saves for the
backward pass. Several more runs find the shortest time. The model's gradients, buffers and random streams are restored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.large.meta_parameters import stand_ins
from paceline.parallel.pipeline.cut import Block
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.parallel.recompute import Recomputed, checkpoints_opened
from paceline.parallel.task import Task
from paceline.parallel.tied_parameters import first_names, owner_of
from paceline.parallel.tracing.boundaries import Boundaries, Mark
from paceline.parallel.tracing.fake_model import attributes_kept, untouched
from paceline.parallel.tracing.segments import Segment, split

_T = TypeVar("_T")

#: Time a block at least REPEATS times. If it takes less than SHORT_S seconds, time it MOST_REPEATS times, to reduce the noise.
REPEATS, MOST_REPEATS, SHORT_S = 3, 10, 0.01
#: How many blocks of each kind to time. The shortest of their times counts for all blocks of the kind.
ALIKE = 3
#: If timing a block has taken this many seconds, begin no further repeat.
ENOUGH_S = 4.0


def measure(
    task: Task,
    micro: Microbatch,
    boundaries: Boundaries,
    marks: Sequence[tuple[Mark, int]],
    device: torch.device,
    loss: Callable[[object], Tensor],
) -> tuple[Block, ...]:
    """Measure the blocks of a model: one before the first mark, and one per mark.

    Args:
        task: The model and its loss.
        micro: The microbatch to measure with.
        boundaries: The positions at which the model can be cut, in its trace for this microbatch.
        marks: For each block but the first: the module call that begins it (mark), and the number of graph nodes before it.
        device: The device for parameters without memory, which get random values while their block is measured.
        loss: output -> loss, which counts as part of the last block.
    """
    model = task.model
    segments = split(boundaries, [place for _, place in marks])
    names = ["the start", *(str(mark) for mark, _ in marks)]
    first = first_names(model)
    blocks = []
    # Similar blocks take equal time. So time only some blocks of each kind, and use the shortest time for all blocks of the kind.
    times_of: dict[Hashable, list[tuple[float, float]]] = {}
    received: tuple[Tensor, ...] = ()
    with untouched(model), attributes_kept(model):
        for name, segment in zip(names, segments, strict=True):
            finish = loss if segment is segments[-1] else None
            own = _named(model, segment.uses)
            with stand_ins(model, device, names=own, dense=True):
                run = _Run(segment, task, micro, received, finish, device)
                result, saved_bytes = run.count_saved()
                known = times_of.setdefault(_kind(model, segment, finish), [])
                if len(known) < ALIKE:
                    known.append(run.time())
                times = min(known, key=sum)
            if any(isinstance(part, Recomputed) for part in _modules(model, segment)):
                # A block that is recomputed keeps its input. autograd's hooks don't report this input as saved, so add its bytes.
                saved_bytes += sum(value.bytes for value in segment.receives)
            held = {first[own_name]: param.nbytes for own_name, param in own.items()}
            blocks.append(
                Block(
                    name=name,
                    forward_s=times[0],
                    backward_s=times[1],
                    parameters=tuple(held.items()),
                    activation_bytes=saved_bytes,
                    live_bytes=sum(value.bytes for value in segment.receives),
                )
            )
            received = result
    return tuple(blocks)


def saved_by(forward: Callable[[], _T], model: nn.Module) -> tuple[_T, int]:
    """Run a forward pass. Return its result and the bytes kept for backward."""
    kept = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            sizes[storage._cdata] = storage.nbytes()
        # Detach the result: a saved result of an operation such as attention would otherwise keep the result's graph in memory.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
        # Sum now, while the graph keeps the storages alive: `sizes` has their addresses as keys, and new storages may get these.
        return result, sum(sizes.values())


class _Run:
    """A block of the model with its inputs, ready to run."""

    def __init__(
        self,
        segment: Segment,
        task: Task,
        micro: Microbatch,
        received: Sequence[Tensor],
        finish: Callable[[object], Tensor] | None,
        device: torch.device,
    ) -> None:
        self._segment, self._task, self._finish, self._device = segment, task, finish, device
        self._batch = tensors_in((micro.args, micro.kwargs))
        self._received = [
            tensor.detach().clone().requires_grad_(value.requires_grad)
            for tensor, value in zip(received, segment.receives, strict=True)
        ]
        self._params = [param for param in _named(task.model, segment.uses).values() if param.requires_grad]

    def count_saved(self) -> tuple[tuple[Tensor, ...], int]:
        """Run the forward pass. Return detached results, and the bytes kept for backward."""
        result, saved_bytes = saved_by(self._forward, self._task.model)
        return map_tensors(result, Tensor.detach), saved_bytes

    def time(self) -> tuple[float, float]:
        try:
            return self._timed()
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
        # torch.autograd.grad refuses reentrant checkpoints: call their functions directly, without the recomputation.
        with checkpoints_opened():
            return self._timed()

    def _timed(self) -> tuple[float, float]:
        best = (float("inf"), float("inf"))
        begin = time.perf_counter()
        for repeat in range(MOST_REPEATS):
            start = now()
            result = self._forward()
            middle = now()
            self._backward(result)
            end = now()
            best = min(best, (middle - start, end - middle), key=sum)
            if time.perf_counter() - begin > (ENOUGH_S if repeat + 1 < REPEATS else SHORT_S):
                break
        return best

    def _forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), self._task.autocast(self._device):
            result = self._segment(self._task.model, self._received, self._batch)
            return tuple(tensors_in(result)) if self._finish is None else (self._finish(result),)

    def _backward(self, result: tuple[Tensor, ...]) -> None:
        outputs = [tensor for tensor in result if tensor.requires_grad]
        wanted = [tensor for tensor in (*self._received, *self._params) if tensor.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)


def _kind(model: nn.Module, segment: Segment, finish: object) -> Hashable:
    """Return a key that is equal for blocks that take equal time.

    `finish`: The loss function if the segment is the last block, else None.
    """
    parts = tuple(
        (
            type(inner),
            inner.extra_repr(),
            tuple((param.shape, param.dtype, param.requires_grad) for param in inner.parameters(recurse=False)),
            # Leave out `layer_idx`, which is a Hugging Face block's number in its model, not a setting.
            tuple(
                (name, value)
                for name, value in vars(inner).items()
                if isinstance(value, (int, float, str)) and name != "layer_idx"
            ),
        )
        for part in _modules(model, segment)
        for inner in part.modules()
    )
    inputs = tuple((value.shape, value.dtype, value.requires_grad) for value in segment.receives)
    # Remove numbers from the source, because similar parts of a model differ only in the numbers of blocks and values.
    return parts, inputs, re.sub(r"\d+", "", segment.source), finish is not None


def _modules(model: nn.Module, segment: Segment) -> list[nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    return [known[name] for name in segment.uses if name in known]


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    params: dict[str, nn.Parameter] = {}
    for name in names:
        owner, last = owner_of(model, name)
        if last in owner._modules:
            params |= model.get_submodule(name).named_parameters(name, remove_duplicate=False)
        elif (param := owner._parameters.get(last)) is not None:
            params[name] = param
    return params


def now() -> float:
    """Wait until the GPU is idle, and return the time in seconds."""
    # Don't synchronise a GPU that is not in use yet, because this would allocate memory on it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
