"""The user's model, run in one process on the pieces of a batch, to compare a layout's results with it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch, Parts, consecutive, piece_sizes
from paceline.parallel.batches.rows import Rows, join_rows, move, unwrap
from paceline.parallel.deterministic_rng import Steady, generators, generators_kept, states
from paceline.parallel.errors import ParallelError
from paceline.parallel.full_tensor import whole
from paceline.parallel.loss_means import MeanOver, StepMeans, mean_over, scale_gradients
from paceline.parallel.loss_state import LossState, Number, loss_kept
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.parallel.reduce import anywhere, local
from paceline.parallel.task import Task, own_loss
from paceline.parallel.tracing.fake_model import attributes_kept, buffers_kept, modes_kept
from paceline.parallel.tracing.reads import plain_attributes
from paceline.torch_private import BatchNorm, DispatchMode, InstanceNorm

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle
    from paceline.parallel.mesh import World
    from paceline.torch_private import Operation


_log = logging.getLogger(__name__)

#: The largest allowed difference, relative to the largest gradient. Summing in a different order causes rounding errors.
LIMITS = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class DiffersError(Exception):
    """A layout's results differ from the plain model's."""


class CannotCompareError(Exception):
    """A comparison with the plain model is impossible. All ranks raise it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The loss, gradients and buffers after one step.

    `scales` maps the name of a running mean (a buffer) to the magnitude of the averaged numbers, because the mean
    itself may be nearly 0.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    #: The state that the loss keeps between its calls. Empty if the loss's result does not depend on earlier calls.
    kept: dict[str, Number] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    def largest(self) -> float:
        return max((largest_magnitude(grad) for grad in self.gradients.values() if grad is not None), default=0.0)


class PlainRun:
    """The user's model and a batch, to compute steps in one process."""

    def __init__(self, model: nn.Module, parts: Parts, task: Task, device: torch.device, *, is_cut: bool) -> None:
        self._model, self._task, self._device, self._is_cut = model, task, device, is_cut
        self._parts = parts
        #: Whether the loss's result depends on earlier calls of the loss.
        self.reads_kept = False

    def run(self, *, shaken: float = 0.0, replicas: int = 1) -> StepResult:
        """Compute loss, gradients and buffers of one step over all microbatches.

        Args:
            shaken: Change each number of a parameter by up to this fraction, to measure the effect of rounding.
            replicas: Compute each microbatch in this many pieces.
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
            gradients = {name: dense(param.grad) for name, param in self._model.named_parameters()}
            after = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
            return StepResult(
                loss=total,
                gradients=gradients,
                buffers=after,
                kept=LossState(loss, model).numbers if self.reads_kept else {},
                scales=_scales_of_means(self._model, before, after, len(pieces)),
            )

    def _cut(self, replicas: int) -> tuple[list[Parts], list[float]]:
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
        """Log a warning if the model's own loss depends on the cut into microbatches.

        BatchNorm uses its running statistics in this test, because its known dependence on microbatches needs no warning.
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

    def run_short(self, world: World, own: Sequence[Microbatch]) -> StepResult:
        """Compute a step on a few rows, or raise CannotCompareError if that fails.

        `own` has this rank's share of the rows, which the model must be able to compute alone.
        """
        before, failed, result = states(self._device), "", None
        try:
            # Enable gradients, because the forward of a model may itself use autograd.
            with torch.enable_grad(), self._task.autocast(self._device), unchanged(self._model):
                for micro in own:
                    self._model(*micro.args, **micro.kwargs)
            result = self.run()
        except (ParallelError, DiffersError):
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if anywhere(result is None, world) or result is None:
            raise CannotCompareError(
                f"it can't compute the first rows of a batch alone ({failed or 'on another rank'})"
            )
        if anywhere(states(self._device) != before, world):
            raise CannotCompareError("it draws random numbers that can't be made the same on two layouts")
        if anywhere(not math.isfinite(result.loss + result.largest()), world):
            raise CannotCompareError("its loss, or a gradient, is not finite")
        return result

    def _run(self, piece: Parts, part: float) -> float:
        there = unwrap(move(piece, self._device))
        with self._task.autocast(self._device):
            output = self._model(*there.args, **there.kwargs)
            before = LossState(self._task.loss, self._task.model)
            # Copy the output, because a loss may change it in place.
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
        # Check only after the backward pass: the checks change and restore tensors, which autograd may have saved.
        if self._is_cut:
            with loss_kept(self._task.loss, self._task.model):
                self._check_put_back(before, loss, kept, there.target)
                _check_mean(loss, lambda times: self._loss_of_more(before, there, kept, times))
        return float(share.detach())

    def _check_put_back(self, before: LossState, loss: Tensor, output: object, target: object) -> None:
        """Raise if the state of the loss cannot be restored to the snapshot `before`."""
        if self._task.loss is own_loss:
            return  # the loss is in the model, so its state is restored with the model's
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
            return  # no check: the loss accepts only an output that has gradients
        if is_far(other) and states(self._device) == drawn:
            name = getattr(self._task.loss, "__qualname__", type(self._task.loss).__qualname__)
            what = f" ({', '.join(before.iterators[:3])})" if before.iterators else ""
            raise DiffersError(
                f"the loss {name} gives {float(given):.6g}, and {other:.6g} for the same output and target: it keeps something "
                f"between its calls that Paceline can't put back{what}. Keep it in an attribute of the loss, a buffer or a "
                "variable, as a number, a tensor or a list; an iterator, a generator or a file can't be put back."
            )

    def _loss_of_more(self, before: LossState, there: Parts, output: object, times: int) -> Tensor:
        """Return the loss of `times` joined copies of the batch `there`.

        First restore `before`, the loss function's own state. `output` is the model's output for `there`.
        """
        before.put_back()
        if self._task.loss is not own_loss:
            with self._task.autocast(self._device):
                return self._task.loss(join_rows([output] * times), join_rows([there.target] * times))
        more: Parts = join_rows([there] * times)
        with self._task.autocast(self._device), unchanged(self._model):
            return own_loss(self._model(*more.args, **more.kwargs), more.target)


def warn_of_parts(par: ParallelHandle, parts: Parts, microbatches: int) -> None:
    """Log a warning if the model's own loss depends on the cut into microbatches."""
    task = dataclasses.replace(par.task, microbatches=microbatches, means=StepMeans())
    plain = PlainRun(par.module, parts, task, par.world.device, is_cut=True)
    with generators(0, par.world.device), generators_kept(), Steady():  # type: ignore[no-untyped-call]
        plain.warn_of_parts()


@contextlib.contextmanager
def _shaken(model: nn.Module, by: float) -> Iterator[None]:
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


def _check_mean(loss: Tensor, of_more: Callable[[int], Tensor]) -> None:
    """Raise DiffersError if the loss is a sum: `of_more(n)` repeats the rows n times."""
    try:
        with torch.no_grad():
            one = float(loss)
            # Triple the rows too: a contrastive loss may double with doubled rows (log 2 becomes log 4) without being a sum.
            two, three = (float(of_more(times)) for times in (2, 3))
    except Exception:
        return  # no check: the loss accepts only this number of rows
    if one and abs(two - 2 * one) <= 1e-3 * abs(one) and abs(three - 3 * one) <= 1e-3 * abs(one):
        raise DiffersError(
            f"loss(output, target) is {one:.6g}, and {two:.6g} for the same rows twice: it is a sum. It must return the mean "
            "(reduction='mean'), because a batch is computed in parts, and each part of a sum would count as much as the whole."
        )


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """After the block, restore the module's frozen parameters, buffers and plain attributes."""
    tensors = [tensor for part in module.modules() for tensor in tensors_in(plain_attributes(part))]
    # Save frozen parameters too, because a forward pass may write to them, for example to those of a momentum encoder.
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


def _scales_of_means(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor], calls: int
) -> dict[str, float]:
    """Return running mean's name -> standard deviation of the averaged values.

    The deviation follows from the running variance. `calls` is the number of batches, for layers that do not count batches.
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
        scales[mean] = math.sqrt(factor * largest_magnitude(own))
    return scales


class Narrowest(DispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that records the coarsest rounding (`eps`) of all results' dtypes."""

    eps = 0.0

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return result


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value, or nan if the tensor contains a nan."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().max())
    # Don't use `abs().max()`: it takes ten times as long as aminmax, and needs a copy of the tensor.
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def dense(grad: Tensor | None) -> Tensor | None:
    """Return a gradient as a whole, dense tensor; None stays None."""
    if grad is None:
        return None
    return grad.to_dense() if grad.is_sparse else whole(grad)
