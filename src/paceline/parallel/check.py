"""Comparison of one training step in a layout with the same step of the plain model in one process.

The comparison shows whether the layout computes the same results. Dropout and other random numbers are equal in both steps
(`deterministic_rng`). Afterwards buffers, gradients, module attributes and random generators have their former values.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch, Parts
from paceline.parallel.batches.microbatches import OwnBatch, cut, cut_parts, global_parts
from paceline.parallel.deterministic_rng import Steady, generators, generators_kept, states
from paceline.parallel.errors import ParallelError, error_summary
from paceline.parallel.exchange import gather
from paceline.parallel.failure import is_communication
from paceline.parallel.full_tensor import whole
from paceline.parallel.loss_means import StepMeans, scale_gradients
from paceline.parallel.loss_state import LossState, Number, loss_kept
from paceline.parallel.plain_run import (
    LIMITS,
    CannotCompareError,
    DiffersError,
    Narrowest,
    PlainRun,
    StepResult,
    dense,
    largest_magnitude,
    unchanged,
)
from paceline.parallel.reduce import anywhere, sum_number
from paceline.parallel.tracing.source import error_line

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle

_log = logging.getLogger(__name__)

#: Maximum difference between a layout's results and the plain model's results. They differ because a layout sums in another
#: order. The unit is the change that a rounding error in each parameter causes in the plain model.
ROUNDINGS = 50
#: Prefixes that mark buffers and a loss's state among the names of results; names of gradients have no prefix.
_BUFFER, _KEPT = "buffer ", "kept "


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a successful comparison with the plain model.

    Attributes:
        loss: The loss in the layout.
        plain_loss: The plain model's loss.
        difference: The largest difference of a gradient, as a fraction of the largest gradient.
        name: The name of the parameter with this largest difference.
        limit: The largest allowed difference.
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


def check(par: ParallelHandle, batch: object, limit: float | None = None) -> Checked:
    """Return the comparison of one step with the plain model.

    Every rank must call this. If the replicas have padded their rows to different lengths, each replica is compared separately,
    and the result has the largest difference.

    Args:
        par: The model in its layout.
        batch: A batch from `Parallel.epoch`, or a whole global batch.
        limit: The largest allowed difference, as a fraction of the largest gradient. None takes a limit for the
            parameters' dtype. This limit is raised if rounding errors alone change the plain model's results by more.

    Raises:
        ParallelError: On every rank, with the parameters or buffers that differ.
    """
    par.executor_for(batch)
    every = global_parts(batch, par.task, par.world)
    try:
        if not isinstance(batch, OwnBatch):
            return compare(par, every[0], cut(batch, par.task, par.world), limit)
        if len(every) > 1:
            # Each result below has one replica's padding. A step with all replicas refuses a loss that depends on the padding.
            kept = loss_kept(par.task.loss, par.task.model)
            with kept, generators(0, par.device), generators_kept(), unchanged(par.executor.module), Steady():  # type: ignore[no-untyped-call]
                nn.Module.zero_grad(par.executor.module)
                _trained(par, cut(batch, par.task, par.world))
        results = [compare(par, parts, cut_parts(parts, par.task, par.world), limit) for parts in every]
        return max(results, key=lambda checked: checked.difference)
    except (DiffersError, CannotComputeError) as error:
        raise ParallelError(str(error)) from error.__cause__


class CannotComputeError(Exception):
    """The layout failed on rows that the plain model can compute."""


def compare(
    par: ParallelHandle,
    parts: Parts,
    micros: Sequence[Microbatch],
    limit: float | None = None,
    *,
    is_short: bool = False,
) -> Checked:
    """Compare the results for this rank's rows with the plain model's.

    Every rank must call this.

    Args:
        par: The model in its layout.
        parts: All rows of the batch, for the plain model.
        micros: This replica's microbatches of the batch.
        limit: The largest allowed difference, see `check`.
        is_short: The batch is only a few rows that Paceline chose. If the plain model cannot compute them, raise
            CannotCompareError instead of an error about the user's batch.

    Raises:
        DiffersError: Loss, gradients or buffers differ from the plain model's.
        ParallelError: The model, the loss or the batch cannot be used with this layout.
        CannotCompareError: With `is_short`: the plain model cannot compute these rows, or its random numbers cannot be fixed.
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
        # Gather each module's mode from all stages: a frozen BatchNorm may be in evaluation mode while other modules train.
        modes = {name: mode for of_stage in gather(modes, pipe) for name, mode in of_stage.items()}
    for name, part in reference.named_modules():
        part.training = modes.get(name, executor.module.training)
    plain = PlainRun(reference, parts, task, world.device, is_cut=world.replicas > 1 or task.microbatches > 1)
    with generators(0, world.device), generators_kept(), unchanged(executor.module), Steady():  # type: ignore[no-untyped-call]
        nn.Module.zero_grad(executor.module)
        first = plain.run_short(par.world, micros) if is_short else plain.run()
        if is_short and world.rank == 0:
            plain.warn_of_parts()
        own_reads = [name for name, param in executor.named_parameters().items() if param.grad is not None]
        if anywhere(bool(own_reads), world):
            # The loss was called for the plain copy. If the user's model now has gradients, the loss reads the user's model.
            raise (CannotCompareError if is_short else ParallelError)(
                f"the loss reads {own_reads[0] if own_reads else 'a parameter'} of the model itself, and the copy with which it "
                "would be compared has another"
            )
        with loss_kept(task.loss, task.model) as state:
            own_loss, factor = _trained(par, micros)
            kept_by_loss = LossState(task.loss, task.model).numbers
        # In a pipeline only the last stage calls the loss. On other stages the loss's state has not changed: drop it.
        if world.layout.pipe > 1 and not any(
            _far(value, state.numbers.get(name)) for name, value in kept_by_loss.items()
        ):
            kept_by_loss = {}
        loss = factor * sum_number(float(own_loss), world.replica_group, world.device)
        gradients = {name: dense(param.grad) for name, param in executor.named_parameters().items()}
        kept = {name for name, _ in reference.named_buffers() if name in reference.state_dict()}
        buffers = {name: whole(value).clone() for name, value in executor.module.named_buffers() if name in kept}
        nn.Module.zero_grad(executor.module)
        executor.begin_anew()
        result = StepResult(loss=loss, gradients=gradients, buffers=buffers, kept=kept_by_loss)
        par.task.means.keeps_state = plain.reads_kept
        allowed, apart = _allowed(par, first, limit), _distances(par, result, first)
        room: dict[str, float] = {}
        if limit is None and max(apart.values(), default=0.0) > allowed:
            # Measure how much rounding changes the plain model: some models amplify rounding, or compute partly in a narrower
            # dtype than their parameters have. Even a correct layout may differ from such a model by as much.
            drawn = states(world.device)
            with Narrowest() as seen:  # type: ignore[no-untyped-call]
                plain.run()
            other = plain.run(shaken=seen.eps)
            # Use this difference only if the model has drawn no random numbers, which could be the reason for it.
            if states(world.device) == drawn:
                noise = _distances(par, other, first, is_plain=True)
                allowed = max(allowed, min(ROUNDINGS * _farthest(noise), 1.0))
                # Give each value its own limit: a buffer that is 0 except for rounding must not raise the limit of gradients.
                room = {name: ROUNDINGS * far for name, far in noise.items()}
        # If the loss differs too, it may compare a batch's rows with each other. To test this, run the plain model with each
        # replica's rows separately. (If only gradients differ, a user's hook may change a part of a gradient.)
        if world.replicas > 1 and apart[""] > allowed:
            by_replica = plain.run(replicas=world.replicas)
            if _farthest(_distances(par, result, by_replica)) <= allowed:
                raise _rows_compared(par, result, first)
    return _verdict(par, result, first, apart, allowed, room)


def _trained(par: ParallelHandle, micros: Sequence[Microbatch]) -> tuple[Tensor, float]:
    """Run one step. Return (loss, factor).

    The factor turns the loss into a mean: the caller must multiply the loss by it. The gradients in the parameters are
    already multiplied. A failed step raises CannotComputeError.
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
            raise  # the failing rank reports its own error
        raise CannotComputeError(
            f"on {par.world.layout} the model can't compute the first rows of the first batch, which it can in one process: "
            f"{error_line(error)}: {error_summary(error)}. {_way_out(par, error)}"
        ) from error


def _way_out(par: ParallelHandle, error: Exception) -> str:
    """Return advice for a user whose model fails in this layout."""
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


def _rows_compared(par: ParallelHandle, result: StepResult, plain: StepResult) -> DiffersError:
    return DiffersError(
        f"on {par.world.layout} the loss is {result.loss:.6g}, and the plain model's {plain.loss:.6g}: the layout's is what "
        "comes of each replica's rows by themselves. The loss, or the model's forward, compares the rows of a batch with one "
        "another (a contrastive loss, a mean over the batch), or the loss is a mean over something else than rows, such as "
        "tokens that count: say over what, with loss_weight=. With data parallelism each replica has some of the rows "
        "alone, which by its nature is another training. Under TensorParallel() or PipelineParallel() the rows of a "
        "microbatch stay together."
    )


def _allowed(par: ParallelHandle, plain: StepResult, limit: float | None) -> float:
    if limit is not None:
        return limit
    dtypes = [grad.dtype for grad in plain.gradients.values() if grad is not None]
    dtypes += [torch.bfloat16] * (par.task.precision == "bf16")
    return max((LIMITS.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)


def _distances(
    par: ParallelHandle, result: StepResult, plain: StepResult, *, is_plain: bool = False
) -> dict[str, float]:
    """Return name -> distance of the layout's value from the plain model's.

    The loss has the name "". A gradient's distance is relative to the largest gradient, a buffer's to the buffer.
    Return the maximum over all ranks. With `is_plain`, `result` is from the plain model too, and only this rank counts.
    """
    largest = plain.largest()
    own = {name: _apart(grad, plain.gradients.get(name), largest) for name, grad in result.gradients.items()}
    for name, value in result.buffers.items():
        if (other := plain.buffers.get(name)) is not None:
            own[_BUFFER + name] = _apart(value, other, max(largest_magnitude(other), plain.scales.get(name, 0.0)))
    for name in result.kept.keys() & plain.kept.keys():
        own[_KEPT + name] = _far(result.kept[name], plain.kept[name])
    own[""] = abs(result.loss - plain.loss) / max(abs(plain.loss), 1e-12)
    if is_plain or par.world.size == 1:
        return own
    apart: dict[str, float] = {}
    for of_rank in gather(own):
        for name, far in of_rank.items():
            # Replace nan by infinity, because `max` might skip a nan.
            apart[name] = max(apart.get(name, 0.0), float("inf") if math.isnan(far) else far)
    return apart


def _verdict(
    par: ParallelHandle,
    result: StepResult,
    plain: StepResult,
    apart: dict[str, float],
    allowed: float,
    room: Mapping[str, float],
) -> Checked:
    loss, plain_loss, largest = result.loss, plain.loss, plain.largest()
    if missing := [name for name in plain.gradients if name not in apart]:
        raise ParallelError(f"no rank holds {', '.join(missing[:5])}: the layout has lost {len(missing)} parameters.")
    apart = dict(apart)
    loss_apart = apart.pop("")
    buffers = {name: apart.pop(name) for name in list(apart) if name.startswith(_BUFFER)}
    kept = {name: apart.pop(name) for name in list(apart) if name.startswith(_KEPT)}
    if far := _beyond(kept, lambda name: max(allowed, 1e-6)):
        raise DiffersError(
            f"on {par.world.layout} the loss keeps something else between its calls than in one process: "
            f"{', '.join(name.removeprefix(_KEPT) for name in far[:5])}. Each replica calls it with only its own "
            "rows. Sum its state over the replicas (torch.distributed.all_reduce), or use TensorParallel() or "
            "PipelineParallel()."
        )
    if far := _beyond(apart, lambda name: allowed):
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
    far = _beyond(buffers, lambda name: max(allowed, 1e-6, room.get(name, 0.0)))
    if far and par.world.layout.batch_norm != "local":
        raise DiffersError(
            f"on {par.world.layout} the model's buffers are not those of the plain model after one step: "
            f"{', '.join(name.removeprefix(_BUFFER) for name in far[:5])}. Loss and gradients are. {_question_of_buffers(par)}"
        )
    worst = max(apart, key=lambda name: apart[name], default="")
    return Checked(loss=loss, plain_loss=plain_loss, difference=apart.get(worst, 0.0), name=worst, limit=allowed)


def _beyond(apart: Mapping[str, float], limit: Callable[[str], float]) -> list[str]:
    return sorted((name for name in apart if not apart[name] <= limit(name)), key=lambda name: -apart[name])


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


def _apart(grad: Tensor | None, plain: Tensor | None, largest: float) -> float:
    if grad is None or plain is None:
        return float("inf") if any(bool(other.any()) for other in (grad, plain) if other is not None) else 0.0
    if grad.shape != plain.shape:
        return float("inf")
    far = largest_magnitude(grad - plain)
    # Return a nan as it is. The caller counts it as infinitely far, even if both values are nan.
    return far / largest if largest > 0 else far


def _far(one: Number, other: Number | None) -> float:
    match one, other:
        case Tensor(), Tensor():
            return _apart(one.double(), other.double(), largest_magnitude(other.double()))
        case ((int() | float()), (int() | float())):
            return abs(one - other) / max(abs(one), abs(other), 1e-12)
    return float("inf")
