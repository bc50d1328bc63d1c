"""Comparison of one step's loss, gradients and buffers with the plain model's in one process.

It shows whether the model computes the same in its layout. Dropout and other random numbers are equal in both
(`deterministic_rng`). Buffers, gradients, module attributes and random generators are restored afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch, Parts, consecutive, piece_sizes
from paceline.parallel.batches.microbatches import OwnBatch, cut, cut_parts, split
from paceline.parallel.batches.rows import Rows, can_join, gather_parts, join_rows, move, unwrap
from paceline.parallel.deterministic_rng import Steady, generators, generators_kept, states
from paceline.parallel.errors import ParallelError, told
from paceline.parallel.exchange import gather
from paceline.parallel.failure import is_communication
from paceline.parallel.full_tensor import whole
from paceline.parallel.loss_means import MeanOver, StepMeans, mean_over, scale_gradients
from paceline.parallel.loss_state import LossState, loss_kept
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.parallel.reduce import anywhere, local, sum_number
from paceline.parallel.task import own_loss
from paceline.parallel.tracing.fake_model import attributes_kept, buffers_kept, modes_kept
from paceline.parallel.tracing.reads import plain_attributes
from paceline.parallel.tracing.trace import user_line
from paceline.torch_private import BatchNorm, DispatchMode, InstanceNorm

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle
    from paceline.parallel.mesh import World
    from paceline.parallel.task import Task

_log = logging.getLogger(__name__)

#: The largest allowed difference as a fraction of the largest gradient. Small models round differently in another summing
#: order.
LIMITS = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
#: A model that reacts to a rounding error in each parameter may react to another summing order with this many times that
#: difference.
ROUNDINGS = 50
#: Prefixes of the names of buffers and of a loss's state among the names of gradients.
_BUFFER, _KEPT = "buffer ", "kept "


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A successful comparison.

    Attributes:
        difference: The largest difference, as a fraction of the largest gradient.
        name: The parameter that has it.
    """

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


def check(par: ParallelHandle, batch: Any, limit: float | None = None) -> Checked:
    """Compare one step with the plain model, within rounding. Every rank calls it.

    If each replica has padded its rows to another length, the replicas are compared one after the other, and the result is the
    largest difference.

    Args:
        par: The model in its layout.
        batch: A batch from `epoch`, or a global one.
        limit: The largest allowed difference, as a fraction of the largest gradient. None depends on the parameters' dtype
            and on how strongly the plain model itself reacts to rounding.

    Raises:
        ParallelError: On every rank, with the parameters or buffers that differ.
    """
    par.executor_for(batch)
    every = global_parts(batch, par)
    try:
        if not isinstance(batch, OwnBatch):
            return compare(par, every[0], cut(batch, par.task, par.world), limit)
        found = [compare(par, parts, cut_parts(parts, par.task, par.world), limit) for parts in every]
        return max(found, key=lambda one: one.difference)
    except (DiffersError, CannotComputeError) as error:
        raise ParallelError(str(error)) from error.__cause__


class DiffersError(Exception):
    """Values that differ from the plain model's, raised on all ranks. Training would run."""


class CannotComputeError(Exception):
    """A failure of the layout where the plain model computes."""


class CannotCompareError(Exception):
    """A reason, on all ranks, why the chosen rows cannot be compared."""


def compare(
    par: ParallelHandle,
    parts: Parts,
    micros: Sequence[Microbatch],
    limit: float | None = None,
    *,
    is_short: bool = False,
) -> Checked:
    """Compare all rows of a global batch with this rank's share of them.

    With `is_short` these are only some rows, and rows that cannot be compared are no error.

    Raises:
        DiffersError: Loss, gradients or buffers differ from the plain model's.
        ParallelError: The model, the loss or the batch cannot be used with this layout, compared or not.
        CannotCompareError: With is_short: the plain model cannot compute these rows, or draws random numbers that cannot be
            fixed.
        CannotComputeError: On the failing rank: the layout cannot compute these rows.
    """
    from paceline.parallel.checkpoint.store import full_state_dict

    world = par.world
    task = dataclasses.replace(par.task, microbatches=len(micros), means=StepMeans())
    executor = par.executor
    par.settle_buffers()
    reference = par.skeleton.filled(full_state_dict(par), world.device)
    for name, hooks in par.gradient_hooks.items():
        hooks.put_on(reference.get_parameter(name))
    modes = {name: part.training for name, part in executor.module.named_modules()}
    if (pipe := world.group("pipe")) is not None:
        # A stage has only some modules, and a layer's mode may differ from the model's, as that of a frozen BatchNorm does.
        modes = {name: mode for of_stage in gather(modes, pipe) for name, mode in of_stage.items()}
    for name, part in reference.named_modules():
        part.training = modes.get(name, executor.module.training)
    plain = _Plain(reference, parts, task, world.device, is_cut=world.replicas > 1 or task.microbatches > 1)
    with generators(0, world.device), generators_kept(), unchanged(executor.module), Steady():  # type: ignore[no-untyped-call]
        nn.Module.zero_grad(executor.module)
        first = plain.run_short(par.world, micros) if is_short else plain.run()
        if is_short and world.rank == 0:
            plain.warn_of_parts()
        own_reads = [name for name, param in executor.named_parameters().items() if param.grad is not None]
        if anywhere(bool(own_reads), world):
            # The copy's loss has given the user's own model a gradient.
            raise (CannotCompareError if is_short else ParallelError)(
                f"the loss reads {own_reads[0] if own_reads else 'a parameter'} of the model itself, and the copy with which it "
                "would be compared has another"
            )
        with loss_kept(task.loss, task.model) as state:
            own_loss, factor = _trained(par, micros)
            kept_by_loss = LossState(task.loss, task.model).numbers
        # Only a pipeline's last stage calls the loss.
        if world.layout.pipe > 1 and not any(
            _far(value, state.numbers.get(name)) for name, value in kept_by_loss.items()
        ):
            kept_by_loss = {}
        loss = factor * sum_number(float(own_loss), world.replica_group, world.device)
        found = {name: _dense(whole(param.grad)) for name, param in executor.named_parameters().items()}
        kept = {name for name, _ in reference.named_buffers() if name in reference.state_dict()}
        buffers = {name: whole(value).clone() for name, value in executor.module.named_buffers() if name in kept}
        nn.Module.zero_grad(executor.module)
        executor.begin_anew()
        found_all = _Result(loss=loss, gradients=found, buffers=buffers, kept=kept_by_loss)
        par.task.means.keeps_state = plain.reads_kept
        allowed, apart = _allowed(par, first, limit), _distances(par, found_all, first)
        room: dict[str, float] = {}
        if limit is None and max(apart.values(), default=0.0) > allowed:
            # For a usual model this is an error. But some models amplify rounding, or compute a part in a narrower dtype than
            # their parameters have, and differ as much from themselves.
            drawn = states(world.device)
            with Narrowest() as seen:  # type: ignore[no-untyped-call]
                plain.run()
            other = plain.run(shaken=seen.eps)
            # A model that draws its own random numbers differs from itself for another reason.
            if states(world.device) == drawn:
                noise = _distances(par, other, first, is_plain=True)
                allowed = max(allowed, min(ROUNDINGS * _farthest(noise), 1.0))
                # Each value has its own limit: a buffer that is 0 but for rounding says nothing about gradients.
                room = {name: ROUNDINGS * far for name, far in noise.items()}
        # The loss differs too. Perhaps the loss or the forward compares rows with one another, and a plain model that computes
        # the replicas' pieces separately agrees. If only gradients differ, the cause is a user's hook that changes a part of a
        # gradient.
        if world.replicas > 1 and apart[""] > allowed:
            by_replica = plain.run(replicas=world.replicas)
            if _farthest(_distances(par, found_all, by_replica)) <= allowed:
                raise _rows_compared(par, found_all, first)
    return _verdict(par, found_all, first, apart, allowed, room)


def _trained(par: ParallelHandle, micros: Sequence[Microbatch]) -> tuple[Tensor, float]:
    """Run one step and return its loss and the factor to multiply it by.

    The gradients stay. An error here did not occur in the plain model.
    """
    means, group = par.task.means, par.world.replica_group
    try:
        means.begin()
        loss = par.executor.train_step(micros).detach()
        par.executor.finish_gradients()
        means.fill([sum_number(number, group, par.world.device) for number in means.numbers()])
        factor = means.factor()
        scale_gradients(par.executor.named_parameters(), factor)
        return loss, factor
    except ParallelError:
        raise
    except Exception as error:
        if is_communication(error):
            raise  # another rank has it at first hand
        raise CannotComputeError(
            f"on {par.world.layout} the model can't compute the first rows of the first batch, which it can in one process: "
            f"{user_line(error)}: {told(error)}. {_way_out(par, error)}"
        ) from error


def _way_out(par: ParallelHandle, error: Exception) -> str:
    """Return the next step after a layout could not compute the model."""
    needs_whole = "mixed torch.Tensor and DTensor" in str(error) or "storage of size 0" in str(error)
    if par.world.layout.shard > 1 and needs_whole:
        return (
            "The model reads a parameter of a block from outside of it, calls a block's forward() in place of the block, or "
            "takes a gradient of its own. "
            "FullyShard(units=[]) keeps all parameters together during a pass, which needs their memory then."
        )
    return (
        "Compute it otherwise there, or use another strategy, such as DataParallel(), which leaves the model as it is."
    )


def _farthest(apart: dict[str, float]) -> float:
    return max((value for name, value in apart.items() if not name.startswith((_BUFFER, _KEPT))), default=0.0)


def _rows_compared(par: ParallelHandle, found: _Result, plain: _Result) -> DiffersError:
    return DiffersError(
        f"on {par.world.layout} the loss is {found.loss:.6g}, and the plain model's {plain.loss:.6g}: the layout's is what comes "
        "of each replica's rows by themselves. The loss, or the model's forward, compares the rows of a batch with one another "
        "(a contrastive loss, a mean over the batch), or the loss is a mean over something else than rows, such as tokens that "
        "count: say over what, with loss_weight=. With data parallelism each replica has some of the rows alone, which by "
        "its nature is another training. Under TensorParallel() or PipelineParallel() the rows of a microbatch stay together."
    )


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The values of one step.

    `scales` has, for a buffer that is a mean, the size of the averaged numbers. Such a buffer may be 0 except for their
    rounding.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    #: The loss's state between calls, if it changes the loss's result.
    kept: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    def largest(self) -> float:
        return max((_largest(grad) for grad in self.gradients.values() if grad is not None), default=0.0)


def _allowed(par: ParallelHandle, plain: _Result, limit: float | None) -> float:
    if limit is not None:
        return limit
    dtypes = [grad.dtype for grad in plain.gradients.values() if grad is not None]
    if par.task.precision == "bf16":
        dtypes.append(torch.bfloat16)
    return max((LIMITS.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)


def _distances(par: ParallelHandle, found: _Result, plain: _Result, *, is_plain: bool = False) -> dict[str, float]:
    """Return the distance of each value from the plain model's.

    The loss's key is "". Gradients are relative to the largest gradient, buffers to themselves.
    """
    largest = plain.largest()
    own = {name: _apart(grad, plain.gradients.get(name), largest) for name, grad in found.gradients.items()}
    for name, value in found.buffers.items():
        other = plain.buffers.get(name)
        if other is not None:
            own[_BUFFER + name] = _apart(value, other, max(_largest(other), plain.scales.get(name, 0.0)))
    for name in found.kept.keys() & plain.kept.keys():
        own[_KEPT + name] = _far(found.kept[name], plain.kept[name])
    own[""] = abs(found.loss - plain.loss) / max(abs(plain.loss), 1e-12)
    if is_plain or par.world.size == 1:
        return own
    apart: dict[str, float] = {}
    for of_rank in gather(own):
        for name, value in of_rank.items():
            # Treat a nan as infinitely far, because `max` would skip it.
            apart[name] = max(apart.get(name, 0.0), float("inf") if math.isnan(value) else value)
    return apart


def _verdict(
    par: ParallelHandle,
    found: _Result,
    plain: _Result,
    apart: dict[str, float],
    allowed: float,
    room: Mapping[str, float],
) -> Checked:
    loss, plain_loss, largest = found.loss, plain.loss, plain.largest()
    missing = [name for name in plain.gradients if name not in apart]
    if missing:
        raise ParallelError(f"no rank holds {', '.join(missing[:5])}: the layout has lost {len(missing)} parameters.")
    apart = dict(apart)
    loss_apart = apart.pop("")
    buffers = {name: apart.pop(name) for name in list(apart) if name.startswith(_BUFFER)}
    kept = {name: apart.pop(name) for name in list(apart) if name.startswith(_KEPT)}
    if far := sorted((name for name in kept if not kept[name] <= max(allowed, 1e-6)), key=lambda name: -kept[name]):
        raise DiffersError(
            f"on {par.world.layout} the loss keeps something else between its calls than in one process: "
            f"{', '.join(name.removeprefix(_KEPT) for name in far[:5])}. Each replica calls it with its own rows alone. Sum over "
            "the replicas what it keeps (torch.distributed.all_reduce), or use TensorParallel() or PipelineParallel()."
        )
    far = sorted((name for name in apart if not apart[name] <= allowed), key=lambda name: -apart[name])
    if far:
        named = ", ".join(f"{name} ({apart[name]:.1e})" for name in far[:5])
        more = f" and {len(far) - 5} more" if len(far) > 5 else ""
        raise DiffersError(
            f"on {par.world.layout} the gradients are not those of the plain model: {named}{more}, as parts of the largest "
            f"gradient ({largest:.3g}); up to {allowed:.0e} is rounding. The loss is {loss:.6g}, the plain model's "
            f"{plain_loss:.6g}. {_question(par)}"
        )
    if not loss_apart <= allowed:
        raise DiffersError(
            f"on {par.world.layout} the loss is {loss:.8g}, that of the plain model {plain_loss:.8g}. Is loss() the mean "
            "over what loss_weight() counts?"
        )
    far = sorted(
        (name for name in buffers if not buffers[name] <= max(allowed, 1e-6, room.get(name, 0.0))),
        key=lambda name: -buffers[name],
    )
    if far and par.world.layout.batch_norm != "local":
        raise DiffersError(
            f"on {par.world.layout} the model's buffers are not those of the plain model after one step: "
            f"{', '.join(name.removeprefix(_BUFFER) for name in far[:5])}. Loss and gradients are. {_question_of_buffers(par)}"
        )
    worst = max(apart, key=lambda name: apart[name], default="")
    return Checked(loss=loss, plain_loss=plain_loss, difference=apart.get(worst, 0.0), name=worst, limit=allowed)


def _question(par: ParallelHandle) -> str:
    if par.world.replicas > 1 and par.world.layout.batch_norm == "local":
        return "With batch_norm='local' each replica normalises by its own rows: 'sync' is what equals one process."
    if par.world.layout.context > 1:
        return (
            "In a block, do places of a sequence meet outside of F.scaled_dot_product_attention (an attention written by hand, "
            "MultiheadAttention with need_weights=True, attn_implementation='eager', a convolution, a mean), or does it count "
            "its places itself? Compute positions and masks before the first block, and let attention alone mix places."
        )
    if par.world.layout.expert > 1:
        return (
            "Does a mixture of experts add something to the sum of its experts' outputs (a shared expert, its input), or change "
            "that sum? Do so behind the module that holds the experts."
        )
    return "Does the model draw random numbers other than dropout's, or keep state between calls?"


def _question_of_buffers(par: ParallelHandle) -> str:
    if par.world.replicas > 1:
        return (
            "Does its forward compute them from the rows of a batch, of which each replica has others? Sum them over the "
            "replicas (torch.distributed.all_reduce)."
        )
    return (
        "Does its own forward call torch.utils.checkpoint? A normalisation in it is computed twice in one process, and moves its "
        "running statistics twice; a pipeline computes it once. Checkpoint within a block, or by recompute='blocks', which "
        "moves them once everywhere."
    )


def _scales_of_means(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor], calls: int
) -> dict[str, float]:
    """Return the deviation that each running mean has followed, by the buffer's name.

    `calls` is the number of calls of layers that do not count them. A running variance v that has followed a variance s with
    the factor f is (1 - f) v + f s afterwards.
    """
    scales: dict[str, float] = {}
    for prefix, part in model.named_modules():
        mean, variance, count = (
            f"{prefix}.{own}".lstrip(".") for own in ("running_mean", "running_var", "num_batches_tracked")
        )
        if mean not in after or variance not in after or not isinstance(part, (BatchNorm, InstanceNorm)):
            continue
        known = count in after and bool(after[count] != before[count])
        followed = int(after[count] - before[count]) if known else calls
        if part.momentum is not None:
            factor = 1 - (1 - part.momentum) ** followed
        else:
            factor = followed / int(after[count]) if known else 1.0
        own = (after[variance] - (1 - factor) * before[variance]).clamp(min=0)
        scales[mean] = math.sqrt(factor * _largest(own))
    return scales


def _apart(grad: Any, plain: Any, largest: float) -> float:
    if grad is None or plain is None:
        other = grad if plain is None else plain
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    if grad.shape != plain.shape:
        return float("inf")
    far = _largest(grad - plain)
    # A nan stays nan here and counts as infinitely far later: two nans do not agree.
    return far / largest if largest > 0 else far


def _far(one: Any, other: Any) -> float:
    """Return the distance of two numbers or tensors in a loss's state, relative to the larger."""
    if isinstance(one, Tensor) != isinstance(other, Tensor) or other is None:
        return float("inf")
    if isinstance(one, Tensor):
        return float(_apart(one.double(), other.double(), _largest(other.double())))
    return float(abs(one - other) / max(abs(one), abs(other), 1e-12))


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude, or nan if the tensor has one."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().max())
    # `abs().max()` takes ten times as long, and copies what may be the largest gradient.
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def _dense(grad: Any) -> Any:
    """Return a dense gradient: an embedding's may hold only the rows that were looked up."""
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


class Narrowest(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes the dtype with the fewest digits. `eps` is its rounding error."""

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return result


class _Plain:
    """The plain model and the pieces of a batch."""

    def __init__(self, model: nn.Module, parts: Parts, task: Task, device: torch.device, *, is_cut: bool) -> None:
        self._model, self._task, self._device, self._is_cut = model, task, device, is_cut
        self._parts = parts
        #: Whether the loss's state between calls changes its result.
        self.reads_kept = False

    def run(self, *, shaken: float = 0.0, replicas: int = 1) -> _Result:
        """Compute loss and gradients of all microbatches.

        `shaken` perturbs every number of every parameter by this fraction. Each microbatch is computed in `replicas` pieces.
        """
        pieces, weights = self._cut(replicas)
        loss, model = self._task.loss, self._task.model
        shaking = _shaken(self._model, shaken) if shaken else contextlib.nullcontext()
        with unchanged(self._model), loss_kept(loss, model), shaking:
            total, means = 0.0, self._task.means
            means.begin()
            nn.Module.zero_grad(self._model)
            before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
            for piece, weight in zip(pieces, weights, strict=True):
                if weight:
                    total += self._run(piece, weight / sum(weights))
            factor = means.factor()
            total *= factor
            scale_gradients(dict(self._model.named_parameters()), factor)
            gradients = {name: _dense(param.grad) for name, param in self._model.named_parameters()}
            after = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
            return _Result(
                loss=total,
                gradients=gradients,
                buffers=after,
                kept=LossState(loss, model).numbers if self.reads_kept else {},
                scales=_scales_of_means(self._model, before, after, len(pieces)),
            )

    def _cut(self, replicas: int) -> tuple[list[Parts], list[float]]:
        """Return the pieces and their weights."""
        rows, task = Rows(self._parts), self._task
        pieces, weights = [], []
        sizes = piece_sizes(rows.count, task.microbatches, replicas)
        for span in filter(None, consecutive(size for of_micro in sizes for size in of_micro)):
            piece = rows.take(span.start, span.stop)
            weight = len(span) if task.loss_weight is None else task.loss_weight(unwrap(piece.target))
            pieces.append(piece)
            weights.append(float(weight))
        return pieces, weights

    def warn_of_parts(self) -> None:
        """Warn if the model's own loss of a batch differs from that of its microbatches.

        BatchNorm is known to see one microbatch at a time, so it uses its running statistics in both.
        """
        if self._task.loss is not own_loss or self._task.microbatches == 1:
            return
        with modes_kept(self._model), unchanged(self._model), contextlib.suppress(Exception):
            for part in self._model.modules():
                if isinstance(part, BatchNorm):
                    part.eval()
            means, total = StepMeans(), 0.0
            whole = self._own_loss(self._parts)
            pieces, weights = self._cut(1)
            for piece, weight in zip(pieces, weights, strict=True):
                loss = self._own_loss(piece)
                over = MeanOver() if self._task.loss_weight is not None else mean_over(loss)
                share = means.add(over, weight / sum(weights), Rows(piece).count)
                total += share * float(loss.detach()) if share else 0.0
            total, one = total * means.factor(), float(whole.detach())
            if abs(total - one) > LIMITS.get(whole.dtype, 1e-4) * max(abs(one), 1e-12):
                _log.warning(
                    "the model's own loss of some rows is %.6g together and %.6g in %d microbatches: it compares the rows of a "
                    "batch with one another, and each microbatch is trained by itself",
                    *(one, total, self._task.microbatches),
                )

    def _own_loss(self, parts: Parts) -> Tensor:
        there = unwrap(move(parts, self._device))
        with torch.enable_grad(), self._task.autocast(self._device):
            return own_loss(self._model(*there.args, **there.kwargs), there.target)

    def run_short(self, world: World, own: Sequence[Microbatch]) -> _Result:
        """Compute a few rows, which the model may not support.

        `own` is this rank's share, which the model must support too.
        """
        before, failed, found = states(self._device), "", None
        try:
            # With gradients, because a forward may compute one itself.
            with torch.enable_grad(), self._task.autocast(self._device), unchanged(self._model):
                for micro in own:
                    self._model(*micro.args, **micro.kwargs)
            found = self.run()
        except (ParallelError, DiffersError):
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if anywhere(found is None, world) or found is None:
            raise CannotCompareError(
                f"it can't compute the first rows of a batch alone ({failed or 'on another rank'})"
            )
        if anywhere(states(self._device) != before, world):
            raise CannotCompareError("it draws random numbers that can't be made the same on two layouts")
        if anywhere(not math.isfinite(found.loss + found.largest()), world):
            raise CannotCompareError("its loss, or a gradient, is not finite")
        return found

    def _run(self, piece: Parts, part: float) -> float:
        there = unwrap(move(piece, self._device))
        with self._task.autocast(self._device):
            output = self._model(*there.args, **there.kwargs)
            before = LossState(self._task.loss, self._task.model)
            # A loss may change the output in place.
            kept = map_tensors(output, lambda tensor: tensor.detach().clone()) if self._is_cut else None
            loss = self._task.loss_of(output, there.target)
        if part < 1.0 and self._task.loss_weight is None:
            over = mean_over(loss)
            if not over.counts_nothing(loss):
                part = self._task.means.add(over, part, Rows(piece).count)
            if over.count == 0:
                loss = loss.nan_to_num()
        share = loss * part
        if share.requires_grad and part:
            share.backward()  # type: ignore[no-untyped-call]
        # After the backward pass: another call of the model or the loss changes tensors that autograd may have saved, and
        # restores them.
        if self._is_cut:
            with loss_kept(self._task.loss, self._task.model):
                self._check_put_back(before, loss, kept, there.target)
                _check_mean(loss, lambda times: self._loss_of_more(before, there, kept, times))
        return float(share.detach())

    def _check_put_back(self, before: LossState, loss: Tensor, output: Any, target: Any) -> None:
        """Refuse a loss whose state cannot be restored: each comparison would change training.

        `before` is its state before this call, and `output` the model's output before it.
        """
        if self._task.loss is own_loss:
            return  # the model's attributes are put back, and are looked at by themselves
        given, drawn = loss.detach(), states(self._device)

        def again() -> float:
            copied = map_tensors(output, Tensor.clone)
            with torch.no_grad(), self._task.autocast(self._device):
                return float(self._task.loss(copied, target))

        def is_far(other: float) -> bool:
            return abs(other - float(given)) > LIMITS.get(given.dtype, 1e-4) * max(abs(float(given)), 1e-12)

        try:
            self.reads_kept |= is_far(again())
            before.put_back()
            other = again()
        except Exception:
            return  # it can't be called with an output without gradients: nothing can be said
        if is_far(other) and states(self._device) == drawn:
            name = getattr(self._task.loss, "__qualname__", type(self._task.loss).__qualname__)
            what = f" ({', '.join(before.iterators[:3])})" if before.iterators else ""
            raise DiffersError(
                f"the loss {name} gives {float(given):.6g}, and {other:.6g} for the same output and target: it keeps something "
                f"between its calls that Paceline can't put back{what}. Keep it in an attribute of the loss, a buffer or a "
                "variable, as a number, a tensor or a list; an iterator, a generator or a file can't be put back."
            )

    def _loss_of_more(self, before: LossState, there: Parts, output: Any, times: int) -> Tensor:
        """Return the loss of the rows repeated `times` times, from the loss state `before`."""
        before.put_back()
        if self._task.loss is not own_loss:
            with self._task.autocast(self._device):
                return self._task.loss(join_rows([output] * times), join_rows([there.target] * times))
        more: Parts = join_rows([there] * times)
        with self._task.autocast(self._device), unchanged(self._model):
            return own_loss(self._model(*more.args, **more.kwargs), more.target)


def warn_of_parts(par: ParallelHandle, parts: Parts, microbatches: int) -> None:
    """Warn if microbatches change the model's own loss. The model is left unchanged."""
    task = dataclasses.replace(par.task, microbatches=microbatches, means=StepMeans())
    plain = _Plain(par.module, parts, task, par.world.device, is_cut=True)
    with generators(0, par.world.device), generators_kept(), Steady():  # type: ignore[no-untyped-call]
        plain.warn_of_parts()


@contextlib.contextmanager
def _shaken(model: nn.Module, by: float) -> Iterator[None]:
    """Perturb every number of every parameter by a fraction, up or down, within the block."""
    params = [param for param in model.parameters() if param.is_floating_point()]
    before = [param.detach().clone() for param in params]
    try:
        with torch.no_grad():
            for param in params:
                signs = (torch.arange(param.numel(), device=param.device).reshape(param.shape) * 7919 % 3 - 1).to(
                    param.dtype
                )
                param.mul_(1 + signs * max(by, torch.finfo(param.dtype).eps))
        yield
    finally:
        with torch.no_grad():
            for param, value in zip(params, before, strict=True):
                param.copy_(value)


def _check_mean(loss: Any, of_more: Callable[[int], Tensor]) -> None:
    """Refuse a loss that sums: each part of a batch would count as much as the whole.

    A mean does not change when all rows appear twice. `of_more(times)` returns the loss of repeated rows.
    """
    try:
        with torch.no_grad():
            one = float(loss)
            # Three times the rows too: a contrastive loss is near log 2 for two rows and near log 4, twice as much, for four.
            two, three = (float(of_more(times)) for times in (2, 3))
    except Exception:
        return  # not made for other numbers of rows: nothing can be said
    if one and abs(two - 2 * one) <= 1e-3 * abs(one) and abs(three - 3 * one) <= 1e-3 * abs(one):
        raise DiffersError(
            f"loss(output, target) is {one:.6g}, and {two:.6g} for the same rows twice: it is a sum. It has to return the "
            "mean (reduction='mean'), for a batch is computed in parts, of which each would count for as much as the whole."
        )


def global_parts(batch: Any, par: ParallelHandle) -> list[Parts]:
    """Return all rows of the global batch in order, on every rank.

    If each replica has padded its rows to another length, they cannot be joined: return each replica's rows separately.
    """
    world, task = par.world, par.task
    if not isinstance(batch, OwnBatch):
        return [split(batch, task)]
    own: Parts = move(split(batch, task), torch.device("cpu"))
    group = world.replica_group
    if group is None:
        return [own]
    everyone = [Rows(piece) for pieces in gather_parts([own], own, group) for piece in pieces if piece is not None]
    # The rows of each microbatch, as they are within each replica's part.
    sizes = zip(*piece_sizes(batch.global_rows, task.microbatches, world.replicas), strict=True)
    spans = list(map(consecutive, sizes))
    pieces = [
        rows.take(span.start, span.stop)
        for of_micro in zip(*spans, strict=True)
        for rows, span in zip(everyone, of_micro, strict=True)
        if span
    ]
    if can_join(pieces):
        return [join_rows(pieces)]
    counts = [of_replica[-1].stop for of_replica in spans]
    return [rows.take(0, count) for rows, count in zip(everyone, counts, strict=True) if count]


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the module's frozen parameters, buffers and plain attributes after the block."""
    tensors = [tensor for part in module.modules() for tensor in tensors_in(plain_attributes(part))]
    # A forward pass may itself write to frozen parameters, such as those of a momentum encoder.
    frozen = [local(param.detach()) for param in module.parameters() if not param.requires_grad]
    plain = [tensor.detach() for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    before = [(tensor, tensor.clone()) for tensor in (*frozen, *plain)]
    with attributes_kept(module), buffers_kept(module):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)
