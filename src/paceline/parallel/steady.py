"""Random numbers that are the same on every layout, so that two runs of a model can be compared. Loaded on use: it imports torch.

Each layout draws its own numbers for dropout and the like, in another order. Here every operation that draws gives one fixed
number in place of each: dropout keeps everything, noise is a constant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tracing.others import GENERATORS
from paceline.torch_private import DispatchMode


class Steady(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, torch's random operations draw nothing.

    Below autograd and below functions that consist of others, so that dropout within attention is reached too. What a kernel
    draws by itself, as cuDNN's recurrent layers do, is not: `states` tells.
    """

    #: Whether numbers are drawn all the same; see `drawing`.
    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Steady.draws:
            return func(*args, **kwargs)
        name, place = _known(func)
        # At this level operations are torch's own kernels: whatever a layer is made of, its random numbers come from one
        # of these.
        fixed = _FIXED.get(name)
        if fixed is not None:
            return fixed(args, kwargs)
        # Fused attention draws inside of one kernel, which takes the probability as an argument.
        if place is not None:
            kwargs = dict(kwargs)
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Within the block numbers are drawn, from a generator of Paceline's own that gives the same on every layout."""
    before, Steady.draws = Steady.draws, True
    try:
        yield
    finally:
        Steady.draws = before


def states(device: torch.device) -> tuple[Hashable, ...]:
    """The states of the generators of torch, Python and numpy; equal if nothing was drawn in between."""
    found: list[Hashable] = [hash(torch.get_rng_state().numpy().tobytes())]
    if device.type == "cuda":
        found.append(hash(torch.cuda.get_rng_state(device).cpu().numpy().tobytes()))
    return (*found, *(state() for _, state in GENERATORS))


def _known(func: Any) -> tuple[str, int | None]:
    """An operation's name, and the place of `dropout_p` among its arguments: worked out once, for it runs thousands of times."""
    known = _KNOWN.get(func)
    if known is None:
        names = [argument.name for argument in func._schema.arguments]
        place = names.index("dropout_p") if "dropout_p" in names else None
        known = _KNOWN[func] = str(func.overloadpacket), place
    return known


_KNOWN: dict[Any, tuple[str, int | None]] = {}


def _at(args: Any, kwargs: Any, place: int, name: str, default: float) -> float:
    value = args[place] if len(args) > place else kwargs.get(name, default)
    return default if value is None else float(value)


def _dropout(args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    x, p = args[0], float(args[1])
    train = args[2] if len(args) > 2 else kwargs.get("train")
    scale = 1.0 if train is False or p >= 1 else 1 / (1 - p)
    return x * scale, torch.ones_like(x, dtype=torch.bool)


def _new(args: Any, kwargs: Any) -> Tensor:
    options = {name: kwargs[name] for name in ("dtype", "layout", "device", "pin_memory") if name in kwargs}
    return torch.full(list(args[0]), 0.5, **options)


def _order(args: Any, kwargs: Any) -> Tensor:
    return torch.arange(args[0], dtype=kwargs.get("dtype") or torch.int64, device=kwargs.get("device"))


def _like(value: float) -> Callable[[Any, Any], Tensor]:
    def make(args: Any, kwargs: Any) -> Tensor:
        return torch.full_like(args[0], value, dtype=kwargs.get("dtype"), device=kwargs.get("device"))

    return make


def _fill(value: Callable[[Any, Any], float]) -> Callable[[Any, Any], Tensor]:
    def fill(args: Any, kwargs: Any) -> Tensor:
        return args[0].fill_(value(args, kwargs))  # type: ignore[no-any-return]

    return fill


def _integers(args: Any, kwargs: Any) -> Tensor:
    # aten::randint(high, size) and aten::randint.low(low, high, size)
    has_low = len(args) > 2
    options = {name: kwargs[name] for name in ("layout", "device", "pin_memory") if name in kwargs}
    dtype = kwargs.get("dtype") or torch.int64
    return torch.full(list(args[-1]), int(args[0]) if has_low else 0, dtype=dtype, **options)


def _chosen(args: Any, kwargs: Any) -> Tensor:
    # The likeliest first. With replacement more may be asked for than there are, and then they come round again.
    weights, count = args[0], int(args[1])
    order = weights.argsort(-1, descending=True, stable=True)
    chosen: Tensor = order[..., torch.arange(count, device=weights.device) % weights.shape[-1]]
    return chosen


def _normal(args: Any, kwargs: Any) -> Tensor:
    mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        options = {name: kwargs[name] for name in ("dtype", "layout", "device") if name in kwargs}
        return torch.full(list(args[2]), mean + 0.5 * std, **options)
    return mean + 0.5 * std  # type: ignore[no-any-return]


_FIXED: dict[str, Callable[[Any, Any], Any]] = {
    "aten.native_dropout": _dropout,
    "aten.bernoulli": lambda args, kwargs: torch.ones_like(args[0]),
    "aten.bernoulli_": _fill(lambda args, kwargs: 1.0),
    "aten.uniform_": _fill(
        lambda args, kwargs: (_at(args, kwargs, 1, "from", 0.0) + _at(args, kwargs, 2, "to", 1.0)) / 2
    ),
    "aten.normal_": _fill(
        lambda args, kwargs: _at(args, kwargs, 1, "mean", 0.0) + _at(args, kwargs, 2, "std", 1.0) / 2
    ),
    "aten.exponential_": _fill(lambda args, kwargs: 1 / _at(args, kwargs, 1, "lambd", 1.0)),
    "aten.log_normal_": _fill(lambda args, kwargs: 1.0),
    "aten.cauchy_": _fill(lambda args, kwargs: 1.0),
    "aten.geometric_": _fill(lambda args, kwargs: 1.0),
    "aten.random_": _fill(lambda args, kwargs: float(args[1]) if len(args) > 2 else 0.0),
    "aten.normal": _normal,
    "aten.poisson": lambda args, kwargs: args[0].clone(),
    "aten.multinomial": _chosen,
    "aten.rand": _new,
    "aten.randn": _new,
    "aten.randint": _integers,
    "aten.randperm": _order,
    "aten.rand_like": _like(0.5),
    "aten.randn_like": _like(0.5),
    "aten.randint_like": _like(0),
}
