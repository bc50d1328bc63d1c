"""Compare a model that was cut with the plain one, before training starts. Loaded on use: it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError, told
from paceline.parallel.exchange import gather
from paceline.parallel.failure.watch import is_communication
from paceline.parallel.full_tensor import is_part, whole
from paceline.parallel.large.parts import region_of, slices
from paceline.parallel.loss_reads import LossReads, attributes_of
from paceline.parallel.pytree import tensors_in
from paceline.parallel.randomness import derive
from paceline.parallel.reduce import local
from paceline.parallel.reentrant import checkpoints_opened
from paceline.parallel.tensor.groups import undisturbed
from paceline.parallel.tracing.others import GENERATORS
from paceline.parallel.tracing.source import shown

# How far sums in another order may lie apart, in steps of the type on the scale of the largest number. Measured: below 50.
_STEPS = 2000
_MOST = 0.1


def verify(plain: nn.Module, model: nn.Module, sample: Microbatch, group: Any, most_numbers: int | None = None) -> None:
    """Return if the model gives the outputs and gradients that the plain one gives for the sample.

    plain: the same model, whole, with the same values. Both are left as they were, gradients too.
    most_numbers: of parameters with more than that no gradients are compared; None: of all.
    group: the ranks that hold the model's parts; called on all of them.

    Raises:
        ParallelError: the first module, in the order in which they run, whose output differs, or the parameter whose
            gradient does; the same on all ranks of the group.
    """
    drawn = [state() for _, state in GENERATORS]
    expected = _pass(plain, sample, most_numbers)
    for (name, state), before in zip(GENERATORS, drawn, strict=True):
        if state() != before:
            raise ParallelError(
                f"the model's forward draws from {name}, and the workers of TensorParallel(), which have to draw the same, may "
                "each draw others. Draw with torch (torch.rand(())), or use DataParallel() or FullyShard()."
            )
    found = _pass(model, sample, most_numbers)
    message = _first_difference(expected, found)
    if message := next(filter(None, gather(message, group)), ""):
        raise ParallelError(
            f"the model that was cut by TensorParallel() is not the plain one: {message}. Leave what is in this module whole: "
            "TensorParallel(plan={...}) with the layers that may be cut, or 'replicate' for those that may not."
        )


class LossCheck:
    """A loss that reads tensors of the model itself, computed before the model is cut and after it."""

    def __init__(self, model: nn.Module, sample: Microbatch, loss: Callable[[Any], Any]) -> None:
        """On the plain model. A loss that reads nothing of it is not looked at again."""
        self._model, self._sample, self._loss = model, sample, loss
        self._reads = LossReads(model, [tensor for _, tensor in attributes_of(model)])
        self._plain = self._pass()

    def verify(self, group: Any) -> None:
        """Return if the model that was cut gives the same loss and gradients. Called on all ranks of the group.

        Raises:
            ParallelError: it does not, or the loss can't be computed with parts.
        """
        lines = self._reads.state | self._reads.left
        if not lines:
            return
        message = ""
        try:
            found = self._pass()
        except Exception as error:
            if is_communication(error):
                raise
            message = told(error)
        message = message or _first_difference(self._plain, found)
        if message := next(filter(None, gather(message, group)), ""):
            name, line = next(iter((self._reads.parts or lines).items()))
            raise ParallelError(
                f"the loss reads {name or 'a tensor'} of the model itself at {shown(line)}, and TensorParallel() leaves each "
                f"worker a part of it, or of what it is made of ({message}). Leave those layers whole "
                "(TensorParallel(plan={...: 'replicate'})), let the model's forward return it, or use DataParallel() or "
                "FullyShard()."
            )

    def _pass(self) -> _Pass:
        with undisturbed(self._model), torch.enable_grad(), checkpoints_opened():
            output = self._model(*self._sample.args, **self._sample.kwargs)
            self._reads.look_again()
            with self._reads:
                self._reads.may_read(output, self._sample.target, self._sample.weight)
                total = self._loss(output)
            reads = self._reads.state or self._reads.left
            gradients = gradients_of(self._model, total) if reads else {}
            return _Pass(outputs=[("", whole(total.detach()))], gradients=gradients)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """outputs: (module, its output), in order; "" is the model itself. gradients: of the parameters, by name."""

    outputs: list[tuple[str, Tensor]]
    gradients: Mapping[str, Tensor | None]


def _pass(model: nn.Module, sample: Microbatch, most_numbers: int | None) -> _Pass:
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: outputs.extend(
            (name, whole(tensor.detach())) for tensor in tensors_in(output)
        )

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        with undisturbed(model), torch.enable_grad(), checkpoints_opened():
            output = model(*sample.args, **sample.kwargs)
            total = sum(_weighted(index, tensor) for index, tensor in enumerate(_differentiable(output)))
            gradients = gradients_of(model, total, most_numbers)
    finally:
        for handle in handles:
            handle.remove()
    return _Pass(outputs=outputs, gradients=gradients)


def gradients_of(model: nn.Module, total: Any, most_numbers: int | None = None) -> dict[str, Tensor | None]:
    """The gradient of this number by each parameter that learns, by name, in parts where the parameter is.

    Hooks that step an optimizer are not called.

    most_numbers: of parameters with more than that there are none.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if most_numbers is not None:
        named = [(name, param) for name, param in named if param.numel() <= most_numbers]
    if not named or not isinstance(total, Tensor) or not total.requires_grad:
        return {name: None for name, _ in named}
    grads = torch.autograd.grad(total, [param for _, param in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, grads, strict=True)}


def _differentiable(output: Any) -> Iterable[Tensor]:
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad)


def _weighted(index: int, tensor: Tensor) -> Tensor:
    """A number that each element of the tensor has its own part in."""
    generator = torch.Generator().manual_seed(derive("tensor check", index))
    weights = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return (tensor * weights).sum()


def _first_difference(expected: _Pass, found: _Pass) -> str:
    if [name for name, _ in expected.outputs] != [name for name, _ in found.outputs]:
        return "its modules run in another order"
    for (name, x), (_, y) in zip(expected.outputs, found.outputs, strict=True):
        # Between the layers cut by columns and the one cut by rows each rank has a part of an output; the sum behind them
        # is compared.
        if (x.shape == y.shape or not name) and (text := _difference(x, y)):
            return f"the output of {name or 'the model'!r} {text}"
    largest = max((float(grad.abs().max()) for grad in expected.gradients.values() if grad is not None), default=0.0)
    for name, grad in expected.gradients.items():
        other = found.gradients[name]
        if grad is None or other is None:
            if (grad is None) != (other is None):
                return f"the parameter {name!r} has {'a' if grad is None else 'no'} gradient"
        elif text := _difference(*_as_held(grad, other), least_scale=largest * 1e-3):
            return f"the gradient of {name!r} {text}"
    return ""


def _as_held(plain: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    """Both as this rank has the second one: to put it together would take as many messages as there are parameters."""
    if not is_part(other):
        return plain, other
    if any(placement.is_partial() for placement in other.placements):
        return plain, whole(other)
    return plain[slices(region_of(other))], local(other)


def _difference(x: Tensor, y: Tensor, least_scale: float = 0.0) -> str:
    """The distance of `y` from `x`, or "" if rounding explains it. least_scale: at least this is taken for the largest number."""
    if x.shape != y.shape:
        return f"has the shape {list(y.shape)} in place of {list(x.shape)}"
    if not x.is_floating_point() or x.numel() == 0:
        return "" if torch.equal(x, y) else "differs"
    scale = max(float(torch.nan_to_num(x.float()).abs().max()), least_scale)
    allowed = min(_STEPS * torch.finfo(x.dtype).eps, _MOST) * scale
    if torch.allclose(x, y, rtol=0.0, atol=allowed, equal_nan=True):
        return ""
    return f"differs by {float((x - y).abs().max()):.3g}, where at most {allowed:.2g} is rounding"
