"""Random numbers per replica and stage, and fixed ones for comparisons of layouts.

`Streams` seeds each step anew from (seed, step, replica, stage). Two runs draw the same numbers, a resumed run draws what it
would have drawn, replicas and stages draw different numbers, and the ranks of a tensor group, which compute the same rows
together, the same. The process's own generators are restored afterwards. In a world of one dropout draws from torch's
generators as in a plain loop. So with dropout a step differs between two layouts, but is reproducible on each.

`Steady` replaces each random number by a fixed one, so that two layouts can be compared: dropout keeps everything, and noise is
a constant.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.torch_private import DispatchMode


class Streams:
    """The random streams of this rank."""

    def __init__(self, *, seed: int, replica: int, stage: int, device: torch.device, active: bool) -> None:
        self.seed = seed
        self._replica = replica
        self._stage = stage
        self._device = device
        self._active = active

    @contextlib.contextmanager
    def use(self, purpose: str, number: int) -> Iterator[None]:
        """Set torch's generators to the stream of this purpose and number, within the block."""
        if not self._active:
            yield
            return
        # Each step starts a new stream, so that a run resumed at a step draws what it would have drawn.
        seed = derive(purpose, self.seed, number, self._replica, self._stage)
        with generators(seed, self._device):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, and in a world of one the state of torch's generators too."""
        state: dict[str, Any] = {"seed": self.seed}
        if not self._active:
            state["cpu"] = torch.get_rng_state()
            if self._device.type == "cuda":
                state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. The generators' state goes only from a world of one to another."""
        self.seed = int(state["seed"])
        if not self._active and "cpu" in state:
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)


def derive(purpose: str, *numbers: int) -> int:
    """Return a seed of 63 bits. Never change it: checkpoints continue with it."""
    text = f"paceline stream 1 {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def normal(shape: Sequence[int], purpose: str, *numbers: int) -> Tensor:
    """Draw standard normal numbers that depend only on purpose and numbers.

    They are drawn on the CPU, because a GPU's generator gives others.
    """
    generator = torch.Generator().manual_seed(derive(purpose, *numbers))
    with drawing():
        return torch.randn(shape, generator=generator, device="cpu")


@contextlib.contextmanager
def generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of `device` within the block."""
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    # `torch.manual_seed` would also seed other GPUs than this rank's, and restore none.
    torch.default_generator.manual_seed(seed)
    if before_cuda is not None:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if before_cuda is not None:
            torch.cuda.set_rng_state(before_cuda, device)


def _numpy_state() -> Hashable:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"]


#: The generator's name -> its state, which each draw changes.
GENERATORS: tuple[tuple[str, Callable[[], Hashable]], ...] = (
    ("Python's `random`", random.getstate),
    ("numpy's random numbers", _numpy_state),
)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore Python's and numpy's generators after the block."""
    own, numpy = random.getstate(), sys.modules.get("numpy")
    others = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(others)


class Steady(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which torch's random operations draw nothing.

    It acts below autograd and composite functions, so it covers dropout within attention. It does not cover what a kernel draws
    internally, as cuDNN's recurrent layers do; `states` detects that.
    """

    #: Whether numbers are drawn in spite of the mode; see `drawing`.
    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Steady.draws:
            return func(*args, **kwargs)
        name, place = _known(func)
        # Operations at this level are torch's kernels: every layer's random numbers come from one of these.
        fixed = _FIXED.get(name)
        if fixed is not None:
            return fixed(args, kwargs)
        # Fused attention draws inside its kernel, which takes the probability as an argument.
        if place is not None:
            kwargs = dict(kwargs)
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw numbers within the block, from a generator that gives the same on every layout."""
    before, Steady.draws = Steady.draws, True
    try:
        yield
    finally:
        Steady.draws = before


def states(device: torch.device) -> tuple[Hashable, ...]:
    """Return the states of torch's, Python's and numpy's generators, which each draw changes."""
    found: list[Hashable] = [hash(torch.get_rng_state().numpy().tobytes())]
    if device.type == "cuda":
        found.append(hash(torch.cuda.get_rng_state(device).cpu().numpy().tobytes()))
    return (*found, *(state() for _, state in GENERATORS))


def _known(func: Any) -> tuple[str, int | None]:
    """Return an operation's name, and the index of its argument `dropout_p`."""
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
    # The likeliest first. With replacement there may be more draws than values, and the values repeat.
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
