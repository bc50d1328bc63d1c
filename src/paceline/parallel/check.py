"""One step's loss and gradients, compared with the plain model in one process. Loaded on use: it imports torch.

Before training starts: it says whether this model, cut as it is, computes what it did. Dropout is switched off in both,
for their random streams differ; buffers, gradients and random generators are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.batches.batch import Parts, count_rows, move, piece_sizes, take_rows, unwrap
from paceline.parallel.batches.join import join_rows
from paceline.parallel.batches.micros import GlobalBatch, OwnBatch, cut, split
from paceline.parallel.errors import ParallelError
from paceline.parallel.randomness import generators
from paceline.parallel.reduce import sum_number
from paceline.parallel.whole import whole

if TYPE_CHECKING:
    from paceline.parallel.task import Task
    from paceline.parallel.training import Parallel

#: The part of the largest gradient by which any may differ: rounding in other orders of summing, of small models.
LIMITS = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was compared. difference: the largest, as a part of the largest gradient; name: the parameter that has it."""

    loss: float
    plain_loss: float
    difference: float
    name: str
    limit: float

    def __str__(self) -> str:
        return (
            f"equal to the plain model: loss {self.loss:.6g} and {self.plain_loss:.6g}, gradients within "
            f"{self.difference:.1e} of the largest (most in {self.name}; up to {self.limit:.0e} is rounding)"
        )


def check(par: Parallel, batch: Any, limit: float | None = None) -> Checked:
    """What was compared, if it is equal within rounding. Called on all ranks, with a batch from `epoch` or a global one.

    limit: the part of the largest gradient by which any may differ; None goes by the type of the parameters.

    Raises:
        ParallelError: on every rank, with the parameters that differ.
    """
    from paceline.parallel.checkpoint.store import full_state_dict

    task, world = par.task, par.world
    executor = par.executor_for(batch)
    par.settle_buffers()
    micros = cut(batch, task, world)
    parts = _global_parts(batch, par)
    reference = par.skeleton.filled(full_state_dict(par), world.device)
    modes = {name: part.training for name, part in executor.module.named_modules()}
    for name, part in reference.named_modules():
        # A stage has some of the modules; the model itself has a mode everywhere.
        part.training = modes.get(name, executor.module.training)
    with generators(0, world.device), kept_buffers(executor.module), _NoDropout():
        is_cut = world.replicas > 1 or task.microbatches > 1
        plain_loss, plain = _plain_gradients(reference, parts, task, world.device, is_cut=is_cut)
        for param in executor.module.parameters():
            param.grad = None
        own_loss = executor.train_step(micros).detach()
        executor.finish_gradients()
        loss = sum_number(float(own_loss), world.replica_group, world.device)
        found = {name: whole(param.grad) for name, param in executor.named_parameters().items()}
        for param in executor.module.parameters():
            param.grad = None
    return _verdict(par, loss, plain_loss, found, plain, limit)


def _verdict(
    par: Parallel, loss: float, plain_loss: float, found: dict[str, Any], plain: dict[str, Any], limit: float | None
) -> Checked:
    largest = max(
        (float(grad.abs().max()) for grad in plain.values() if grad is not None and grad.numel()), default=0.0
    )
    dtypes = [grad.dtype for grad in plain.values() if grad is not None]
    if par.task.precision == "bf16":
        dtypes.append(torch.bfloat16)
    allowed = limit if limit is not None else max((LIMITS.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)
    own = {name: _apart(grad, plain.get(name), largest) for name, grad in found.items()}
    everyone: list[Any] = [own]
    if par.world.size > 1:
        everyone = [None] * par.world.size
        dist.all_gather_object(everyone, own)
    apart: dict[str, float] = {}
    for of_rank in everyone:
        for name, value in of_rank.items():
            apart[name] = max(apart.get(name, 0.0), value)
    missing = [name for name in plain if name not in apart]
    if missing:
        raise ParallelError(f"no rank holds {', '.join(missing[:5])}: the layout has lost {len(missing)} parameters.")
    far = sorted((name for name in apart if not apart[name] <= allowed), key=lambda name: -apart[name])
    loss_apart = abs(loss - plain_loss) / max(abs(plain_loss), 1e-12)
    if far:
        named = ", ".join(f"{name} ({apart[name]:.1e})" for name in far[:5])
        more = f" and {len(far) - 5} more" if len(far) > 5 else ""
        raise ParallelError(
            f"on {par.world.layout} the gradients are not those of the plain model: {named}{more}, as parts of the largest "
            f"gradient ({largest:.3g}); up to {allowed:.0e} is rounding. The loss is {loss:.6g}, the plain model's "
            f"{plain_loss:.6g}. {_question(par)}"
        )
    if not loss_apart <= allowed:
        raise ParallelError(
            f"on {par.world.layout} the loss is {loss:.8g}, that of the plain model {plain_loss:.8g}. Is loss() the mean "
            "over what loss_weight() counts?"
        )
    worst = max(apart, key=lambda name: apart[name], default="")
    return Checked(loss=loss, plain_loss=plain_loss, difference=apart.get(worst, 0.0), name=worst, limit=allowed)


def _question(par: Parallel) -> str:
    if par.world.replicas > 1 and par.world.layout.batch_norm == "local":
        return "With batch_norm='local' each replica normalises by its own rows: 'sync' is what equals one process."
    return "Does the model draw random numbers other than dropout's, or keep state between calls?"


def _apart(grad: Any, plain: Any, largest: float) -> float:
    if grad is None or plain is None:
        other = grad if plain is None else plain
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    if grad.shape != plain.shape:
        return float("inf")
    far = float((grad.double() - plain.double()).abs().max()) if grad.numel() else 0.0
    # nan on both sides is no agreement.
    return far / largest if largest > 0 else far


def _plain_gradients(
    model: nn.Module, parts: Parts, task: Task, device: torch.device, *, is_cut: bool
) -> tuple[float, dict[str, Tensor | None]]:
    rows = count_rows(parts)
    pieces, weights, start = [], [], 0
    for of_micro in piece_sizes(rows, task.microbatches, 1):
        size = of_micro[0]
        if size:
            piece = Parts(*(take_rows(part, start, start + size, rows) for part in parts))
            pieces.append(piece)
            weights.append(float(size if task.loss_weight is None else task.loss_weight(unwrap(piece.target))))
        start += size
    total = 0.0
    for piece, weight in zip(pieces, weights, strict=True):
        if weight == 0:
            continue
        there = Parts(*(unwrap(move(part, device)) for part in piece))
        with task.autocast(device):
            output = model(*there.args, **there.kwargs)
            loss = task.loss(output, there.target)
            if is_cut:
                _check_mean(task, output, there.target, loss)
        share = loss * (weight / sum(weights))
        if share.requires_grad:
            share.backward()  # type: ignore[no-untyped-call]
        total += float(share.detach())
    return total, {name: param.grad for name, param in model.named_parameters()}


def _check_mean(task: Task, output: Any, target: Any, loss: Any) -> None:
    """Refuse a loss that is a sum: each part of a batch would count for as much as the whole.

    Found by twice the same rows, of which the mean is the same.
    """
    try:
        with torch.no_grad():
            one, two = float(loss), float(task.loss(join_rows([output, output]), join_rows([target, target])))
    except Exception:
        return  # not made for other numbers of rows: nothing can be said
    if one and abs(two - 2 * one) <= 1e-3 * abs(one):
        raise ParallelError(
            f"loss(output, target) is {one:.6g}, and {two:.6g} for the same rows twice: it is a sum. It has to return the "
            "mean (reduction='mean'), for a batch is computed in parts, of which each would count for as much as the whole."
        )


def _global_parts(batch: Any, par: Parallel) -> Parts:
    """All rows of the global batch, on every rank, in their order."""
    world, task = par.world, par.task
    if not isinstance(batch, OwnBatch):
        return split(batch.data if isinstance(batch, GlobalBatch) else batch, task)
    own: Parts = move(split(batch.data, task), torch.device("cpu"))
    group = world.replica_group
    if group is None:
        return own
    everyone: list[Any] = [None] * world.replicas
    dist.all_gather_object(everyone, own, group=group)
    starts = [0] * world.replicas
    pieces = []
    for of_micro in piece_sizes(batch.global_rows, task.microbatches, world.replicas):
        for replica, size in enumerate(of_micro):
            if size:
                parts, first = everyone[replica], starts[replica]
                rows = count_rows(parts)
                pieces.append(Parts(*(take_rows(part, first, first + size, rows) for part in parts)))
                starts[replica] += size
    return Parts(*(join_rows([piece[index] for piece in pieces]) for index in range(3)))


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """The module's buffers are put back when the block ends."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _NoDropout(TorchFunctionMode):
    """Every kind of dropout lets everything through, whoever calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS: set[Callable[..., Any]] = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
}
