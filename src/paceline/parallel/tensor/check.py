"""Compare a model that was cut with the plain one, before training starts. Loaded on use: it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import whole
from paceline.parallel.pytree import tensors_in
from paceline.parallel.randomness import derive
from paceline.parallel.tensor.groups import undisturbed

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
    expected = _pass(plain, sample, most_numbers)
    found = _pass(model, sample, most_numbers)
    message = _first_difference(expected, found)
    if message := next(filter(None, gather(message, group)), ""):
        compiled = next((name for name, part in model.named_modules() if _is_compiled(part)), None)
        if compiled is not None:
            raise ParallelError(
                f"{compiled or 'the model'} is compiled, and what was compiled doesn't compute with the parts that "
                "TensorParallel() makes of its layers. Give parallelize the model as it was before torch.compile, or use "
                "DataParallel() or FullyShard()."
            )
        raise ParallelError(
            f"the model that was cut by TensorParallel() is not the plain one: {message}. Leave what is in this module whole: "
            "TensorParallel(plan={...}) with the layers that may be cut, or 'replicate' for those that may not."
        )


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module) is another module around the first one; module.compile() only sets an attribute.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """outputs: (module, its output), in order; "" is the model itself. gradients: of the parameters, whole, by name."""

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
        with undisturbed(model), torch.enable_grad():
            output = model(*sample.args, **sample.kwargs)
            names, params = _learning(model, most_numbers)
            total = sum(_weighted(index, tensor) for index, tensor in enumerate(_differentiable(output)))
            grads = (
                torch.autograd.grad(total, params, allow_unused=True) if isinstance(total, Tensor) and params else ()
            )
    finally:
        for handle in handles:
            handle.remove()
    gradients = {name: None if grad is None else whole(grad) for name, grad in zip(names, grads, strict=False)}
    return _Pass(outputs=outputs, gradients=gradients)


def _learning(model: nn.Module, most_numbers: int | None) -> tuple[list[str], list[nn.Parameter]]:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if most_numbers is not None:
        named = [(name, param) for name, param in named if param.numel() <= most_numbers]
    return [name for name, _ in named], [param for _, param in named]


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
        elif text := _difference(grad, other, least_scale=largest * 1e-3):
            return f"the gradient of {name!r} {text}"
    return ""


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
