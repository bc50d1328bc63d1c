"""Comparison of a model whose layers are cut over ranks with the plain model, before training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.deterministic_rng import GENERATORS, normal
from paceline.parallel.errors import ParallelError, error_summary
from paceline.parallel.exchange import gather
from paceline.parallel.failure import is_communication
from paceline.parallel.full_tensor import is_part, whole
from paceline.parallel.large.meta_parameters import region_of, slices
from paceline.parallel.loss_state import LossReads, attributes_of, loss_kept
from paceline.parallel.mesh import World
from paceline.parallel.pytree import tensors_in
from paceline.parallel.recompute import checkpoints_opened
from paceline.parallel.reduce import anywhere, local
from paceline.parallel.tensor.groups import undisturbed
from paceline.parallel.tracing.source import shown

# The largest allowed difference, in rounding errors (eps) of the largest number. A different order of sums causes less than 50.
_STEPS = 2000
_MOST = 0.1
#: A gradient's difference is divided by its size, or by this fraction of the largest gradient if that is more.
_LEAST_SCALE = 0.02
#: Cutting may change a result by this many times the change that a rounding error in each module's output would cause.
_ROUNDINGS = 10


class Reference:
    """The plain model's outputs and gradients for some rows.

    The model computes these results before it is cut, so Paceline needs no copy of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Microbatch,
        loss: Callable[[object, Microbatch], Tensor] | None = None,
        most_numbers: int | None = None,
    ) -> None:
        """Compute the plain model's results. The model and its gradients are left unchanged.

        Args:
            model: The plain model.
            sample: The rows to compute.
            loss: (output, sample) -> the loss. None ignores the loss.
            most_numbers: Compare only gradients of parameters with at most this many numbers. None: compare all.

        Raises:
            ParallelError: The forward draws random numbers that may differ between workers.
        """
        self.model, self.sample, self._loss, self._most_numbers = model, sample, loss, most_numbers
        self._reads = LossReads(model, [tensor for _, tensor in attributes_of(model)])
        drawn = [state() for _, state in GENERATORS]
        self._plain = self._pass(is_cut=False)
        self._room = self._room_for_rounding()
        for (name, state), before in zip(GENERATORS, drawn, strict=True):
            if state() != before:
                raise ParallelError(
                    f"the model's forward draws from {name}, and the workers of TensorParallel(), which have to draw the same, "
                    "may each draw others. Draw with torch (torch.rand(())), or use DataParallel() or FullyShard()."
                )

    def verify(self, group: dist.ProcessGroup | None) -> None:
        """Raise unless the model, which is now cut, has the plain model's results.

        Every rank of the group must call this.

        Raises:
            ParallelError: On all ranks of the group. The message names the first module with a different output, a parameter
                with a different gradient, or a tensor that the loss reads although each rank has only a part of it.
        """
        # Store the places where the plain model's loss reads tensors, because the pass below records the reads of the cut model.
        lines = self._reads.state | self._reads.left
        cut = self._pass(is_cut=True)
        message = _first_difference(self._plain, cut, self._room)
        if message := next(filter(None, gather(message, group)), ""):
            raise ParallelError(
                f"the model that was cut by TensorParallel() is not the plain one: {message}. Keep this module "
                "whole: TensorParallel(plan={...}) with the layers to cut, or 'replicate' for those to keep."
            )
        if not lines:
            return
        message = cut.failed or _first_difference(_loss_alone(self._plain), _loss_alone(cut))
        if message := next(filter(None, gather(message, group)), ""):
            name, line = next(iter((self._reads.parts or lines).items()))
            raise ParallelError(
                f"the loss reads {name or 'a tensor'} of the model itself at {shown(line)}, and TensorParallel() leaves each "
                f"worker a part of it, or of its inputs ({message}). Leave those layers whole "
                "(TensorParallel(plan={...: 'replicate'})), let the model's forward return it, or use DataParallel() or "
                "FullyShard()."
            )

    def _room_for_rounding(self) -> _Room:
        """Measure how much rounding errors change the plain model's results."""
        try:
            other = self._pass(is_cut=False, is_shaken=True)
        except Exception as error:
            if is_communication(error):
                raise
            return _Room()
        if [name for name, _ in self._plain.outputs] != [name for name, _ in other.outputs]:
            return _Room()
        return _Room(
            outputs=[_noise(x, y) for (_, x), (_, y) in zip(self._plain.outputs, other.outputs, strict=True)],
            gradients={name: _noise(grad, other.gradients[name]) for name, grad in self._plain.gradients.items()},
        )

    def _pass(self, *, is_cut: bool, is_shaken: bool = False) -> _Pass:
        model, sample = self.model, self.sample
        outputs: list[tuple[str, Tensor]] = []

        def keep(name: str) -> Callable[[nn.Module, object, object], object]:
            def hook(module: nn.Module, args: object, output: object) -> object:
                outputs.extend((name, whole(tensor.detach())) for tensor in tensors_in(output))
                return _shaken(output) if is_shaken and isinstance(output, Tensor) else None

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
        try:
            with undisturbed(model), torch.enable_grad(), checkpoints_opened():
                output = model(*sample.args, **sample.kwargs)
                learning = (tensor for tensor in tensors_in(output) if tensor.requires_grad)
                total = sum(_weighted(index, tensor) for index, tensor in enumerate(learning))
                looks = self._loss is not None and not is_shaken and (not is_cut or self._reads_own())
                outcome = _Pass(outputs=outputs, gradients=gradients_of(model, total, self._most_numbers, again=looks))
                if not looks:
                    return outcome
                try:
                    assert self._loss is not None
                    # Compute the gradients within `loss_kept` too, because they may involve the loss's state.
                    with loss_kept(self._loss, model):
                        loss, of_loss = self._loss_of(output)
                except Exception as error:
                    if not is_cut or is_communication(error):
                        raise
                    return replace(outcome, failed=error_summary(error))
                return replace(outcome, loss=loss, of_loss=of_loss)
        finally:
            for handle in handles:
                handle.remove()

    def _loss_of(self, output: object) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """Return the loss and its gradients; (None, {}) if it does not read the model."""
        assert self._loss is not None
        self._reads.look_again()
        with self._reads:
            self._reads.may_read(output, self.sample.target, self.sample.weight)
            loss = self._loss(output, self.sample)
        if not self._reads_own():
            return None, {}
        return whole(loss.detach()), gradients_of(self.model, loss)

    def _reads_own(self) -> bool:
        return bool(self._reads.state or self._reads.left)


def reference(
    model: nn.Module,
    samples: Sequence[Microbatch],
    world: World,
    loss: Callable[[object, Microbatch], Tensor] | None,
    most_numbers: int | None,
) -> Reference:
    """Compute the plain model's results for the first sample that all ranks can compute.

    Every rank must call this, because all ranks use the same sample. `loss`: (output, sample) -> the loss, or None.
    `most_numbers`: Compute only gradients of parameters with at most this many numbers. None: compute all.
    """
    *fewer, last = samples
    for sample in fewer:
        reference = None
        with contextlib.suppress(Exception):
            reference = Reference(model, sample, loss, most_numbers)
        if not anywhere(reference is None, world) and reference is not None:
            return reference
    return Reference(model, last, loss, most_numbers)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """The results of one forward and backward pass.

    Attributes:
        outputs: (module's name, its output) in the order of calls; "" is the model itself.
        gradients: Parameter's name -> gradient of the parameter.
        loss, of_loss: The loss and its gradients, if the loss reads parameters, buffers or stored tensors of the model.
        failed: The reason why the loss has no result, or "".
    """

    outputs: list[tuple[str, Tensor]]
    gradients: Mapping[str, Tensor | None]
    loss: Tensor | None = None
    of_loss: Mapping[str, Tensor | None] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The largest changes of outputs and gradients that rounding errors cause. Empty if unknown."""

    outputs: Sequence[float] = ()
    gradients: Mapping[str, float] = field(default_factory=dict)


def _shaken(output: Tensor) -> Tensor:
    """Change each number by a relative rounding error of -eps, 0 or eps."""
    if not (output.is_floating_point() or output.is_complex()):
        return output
    signs = torch.arange(output.numel(), device=output.device).reshape(output.shape) * 7919 % 3 - 1
    return output * (1 + signs * torch.finfo(output.dtype).eps).to(output.dtype)


def _noise(x: Tensor | None, y: Tensor | None) -> float:
    if x is None or y is None or x.shape != y.shape or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return scale_of(x - y)


def _loss_alone(outcome: _Pass) -> _Pass:
    return _Pass(outputs=[] if outcome.loss is None else [("", outcome.loss)], gradients=outcome.of_loss)


def gradients_of(
    model: nn.Module, total: object, most_numbers: int | None = None, *, again: bool = False
) -> dict[str, Tensor | None]:
    """Return name -> gradient of `total`, or None, for each trained parameter.

    A gradient is None if `total` does not depend on the parameter. Parameters with more than `most_numbers` numbers are
    left out. Hooks are not called. `again` keeps the graph for another backward pass.
    """
    most = math.inf if most_numbers is None else most_numbers
    params = model.named_parameters()
    named = [(name, param) for name, param in params if param.requires_grad and param.numel() <= most]
    if not named or not isinstance(total, Tensor) or not total.requires_grad:
        return {name: None for name, _ in named}
    grads = torch.autograd.grad(total, [param for _, param in named], retain_graph=again, allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, grads, strict=True)}


def _weighted(index: int, tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (tensor * normal(tensor.shape, "tensor check", index).to(tensor.device, tensor.dtype)).sum()


def _first_difference(expected: _Pass, actual: _Pass, room: _Room | None = None) -> str:
    room = room or _Room()
    if [name for name, _ in expected.outputs] != [name for name, _ in actual.outputs]:
        return "its modules run in another order"
    rooms = room.outputs or [0.0] * len(expected.outputs)
    for (name, x), (_, y), noise in zip(expected.outputs, actual.outputs, rooms, strict=True):
        # Skip modules if each rank has only a part of their output. The next layer that is cut by rows returns a whole output.
        if (x.shape == y.shape or not name) and (text := _difference(x, y, noise=noise)):
            return f"the output of {name or 'the model'!r} {text}"
    largest = max((scale_of(grad) for grad in expected.gradients.values() if grad is not None), default=0.0)
    for name, grad in expected.gradients.items():
        other = actual.gradients[name]
        if grad is None or other is None:
            if (grad is None) != (other is None):
                return f"the parameter {name!r} has {'a' if grad is None else 'no'} gradient"
        elif text := _difference(
            *_as_held(grad, other), least_scale=largest * _LEAST_SCALE, noise=room.gradients.get(name, 0.0)
        ):
            return f"the gradient of {name!r} {text}"
    return ""


def _as_held(plain: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    if not is_part(other):
        return plain, other
    if any(placement.is_partial() for placement in other.placements):
        return plain, whole(other)
    return plain[slices(region_of(other))], local(other)


def _difference(x: Tensor, y: Tensor, least_scale: float = 0.0, noise: float = 0.0) -> str:
    """Describe how `y` differs from `x`.

    Differences count relative to the largest number of `x`, or to `least_scale` if that is larger. `noise` is the change that a
    rounding error causes. Return "" if the difference may be rounding.
    """
    if x.shape != y.shape:
        return f"has the shape {list(y.shape)} in place of {list(x.shape)}"
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
        return "" if torch.equal(x, y) else "differs"
    scale = max(scale_of(x), least_scale)
    allowed = max(min(_STEPS * torch.finfo(x.dtype).eps, _MOST) * scale, min(_ROUNDINGS * noise, _MOST * scale))
    if within(x, y, allowed):
        return ""
    return f"differs by {float((x - y).abs().max()):.3g}, where at most {allowed:.2g} is rounding"


def scale_of(x: Tensor) -> float:
    """Return the largest finite magnitude, or 0.0."""
    if not x.numel():
        return 0.0
    x = _real(x)
    low, high = (float(bound) for bound in torch.aminmax(x.detach()))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    return float(x[x.isfinite()].abs().amax()) if x.isfinite().any() else 0.0


def within(x: Tensor, y: Tensor, allowed: float) -> bool:
    """Return whether `x` and `y` differ by at most `allowed` in each number.

    A nan equals a nan, and an infinity the same infinity. Both parts of complex numbers are compared.
    """
    x, y = _real(x), _real(y)
    # Use aminmax first, because torch.allclose and abs().max() take more than ten times as long.
    if not x.numel():
        return True
    low, high = torch.aminmax((x - y).detach())
    # Comparisons with nan are False, so nan leads to the slow comparison.
    is_near = float(high) <= allowed and -float(low) <= allowed
    return is_near or torch.allclose(x, y, rtol=0.0, atol=allowed, equal_nan=True)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x
