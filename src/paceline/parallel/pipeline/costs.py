"""The cost of each block of a model on this machine, measured on one microbatch. Loaded on use: it imports torch.

Every block runs alone on what the block before gave: once to count what it saves for the backward pass, then a few times by
the clock, of which the shortest counts. Gradients, buffers and random streams of the model are left as they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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

#: So often at least, and more often while that takes no time: what else runs on the machine stops a short block for longer
#: than it takes.
REPEATS, MOST_REPEATS, SHORT_S = 3, 10, 0.01
#: Of blocks that are alike so many are timed.
ALIKE = 3
#: No further repeat is begun after this.
ENOUGH_S = 4.0


def measure(
    task: Task,
    micro: Microbatch,
    boundaries: Boundaries,
    marks: Sequence[tuple[Mark, int]],
    device: torch.device,
    loss: Callable[[Any], Tensor],
) -> tuple[Block, ...]:
    """One block of the task's model for each mark, and one before the first.

    boundaries: of its trace for this microbatch. device: where parameters that have no values yet get some while their block is
        measured. loss: output -> loss, counted with the last block.
    """
    model = task.model
    segments = split(boundaries, [place for _, place in marks])
    names = ["the start", *(str(mark) for mark, _ in marks)]
    first = first_names(model)
    blocks = []
    # Blocks that are alike take as long: of each kind some are timed, and the shortest counts for all.
    times_of: dict[Any, list[tuple[float, float]]] = {}
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
                # What it keeps is its input, of which autograd's hooks are told nothing.
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


def saved_by(forward: Callable[[], Any], model: nn.Module) -> tuple[Any, int]:
    """What it gives, and the bytes that it saves for the backward pass; those of the model's tensors don't count."""
    kept = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            sizes[storage._cdata] = storage.nbytes()
        # Not the tensor itself: of one that an operation has made, such as attention's output, its own graph would hold
        # it, and nothing would ever let go of that graph, nor of the weights in it.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
        # Counted while the graph lives. Once a tensor is freed, another one may get its memory, and with it its key
        # in `sizes`.
        return result, sum(sizes.values())


class _Run:
    """A block, ready to run."""

    def __init__(
        self,
        segment: Segment,
        task: Task,
        micro: Microbatch,
        received: Sequence[Tensor],
        finish: Callable[[Any], Tensor] | None,
        device: torch.device,
    ) -> None:
        self._segment, self._task, self._finish, self._device = segment, task, finish, device
        self._batch = tensors_in((micro.args, micro.kwargs))
        self._received = [
            tensor.detach().clone().requires_grad_(value.requires_grad)
            for tensor, value in zip(received, segment.receives, strict=True)
        ]
        self._params = [param for param in _named(task.model, segment.uses).values() if param.requires_grad]

    def count_saved(self) -> tuple[Any, int]:
        """The result, cut off from its history, and the bytes that were saved."""
        result, saved_bytes = saved_by(self._forward, self._task.model)
        return map_tensors(result, Tensor.detach), saved_bytes

    def time(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass."""
        try:
            return self._timed()
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
        # torch.autograd.grad refuses reentrant checkpoints: what they compute twice is measured once.
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

    def _forward(self) -> Any:
        with torch.enable_grad(), self._task.autocast(self._device):
            result = self._segment(self._task.model, self._received, self._batch)
            return result if self._finish is None else (self._finish(result),)

    def _backward(self, result: Any) -> None:
        outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        wanted = [tensor for tensor in (*self._received, *self._params) if tensor.requires_grad]
        if outputs and wanted:
            gradients = [torch.ones_like(tensor) for tensor in outputs]
            torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)


def _kind(model: nn.Module, segment: Segment, finish: Any) -> Any:
    """Equal for blocks of the same classes and settings, with parameters and inputs of the same shapes."""
    parts = tuple(
        (
            type(inner),
            inner.extra_repr(),
            tuple((param.shape, param.dtype, param.requires_grad) for param in inner.parameters(recurse=False)),
            # A block's own number, which Hugging Face's have, is no setting.
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
    # Names have numbers, those of blocks and of values.
    return parts, inputs, re.sub(r"\d+", "", segment.source), finish is not None


def _modules(model: nn.Module, segment: Segment) -> list[nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    return [known[name] for name in segment.uses if name in known]


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters of the modules of these names, and those that have one of the names themselves."""
    found: dict[str, nn.Parameter] = {}
    for name in names:
        owner, last = owner_of(model, name)
        if last in owner._modules:
            found |= model.get_submodule(name).named_parameters(name, remove_duplicate=False)
        elif (param := owner._parameters.get(last)) is not None:
            found[name] = param
    return found


def now() -> float:
    """The time in seconds once a GPU has done all that it was given."""
    # A GPU that this process has not used has nothing to do, and to ask it would take memory on it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
