"""The random numbers of each replica and stage: dropout and the like. Loaded on use: it imports torch.

Each step starts its stream anew, from (seed, step, replica, stage): two runs give the same numbers, a run that was
resumed gives those it would have had, replicas and stages have different ones, and the ranks of a tensor group, which
compute the same rows together, the same. The process's own generators are put back afterwards.

A world of one is left alone: there, dropout draws from torch's generators as in a plain loop. So with dropout a step is
not equal on two layouts; it is reproducible on each.
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
    """This rank's random streams."""

    def __init__(self, *, seed: int, replica: int, stage: int, device: torch.device, active: bool) -> None:
        self.seed = seed
        self._replica = replica
        self._stage = stage
        self._device = device
        self._active = active

    @contextlib.contextmanager
    def use(self, purpose: str, number: int) -> Iterator[None]:
        """Torch's generators, set to the stream of this purpose and number, until the block ends."""
        if not self._active:
            yield
            return
        # A stream begins anew in each step, and does not go on from the last one, so that a run that is resumed at a step
        # draws what it would have drawn.
        seed = derive(purpose, self.seed, number, self._replica, self._stage)
        with generators(seed, self._device):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint that is kept here: the seed; in a world of one the state of torch's generators too."""
        state: dict[str, Any] = {"seed": self.seed}
        if not self._active:
            state["cpu"] = torch.get_rng_state()
            if self._device.type == "cuda":
                state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the generators' own state only from a world of one to a world of one."""
        self.seed = int(state["seed"])
        if not self._active and "cpu" in state:
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)


def derive(purpose: str, *numbers: int) -> int:
    """A seed of 63 bits; frozen, for checkpoints go on with it."""
    text = f"paceline stream 1 {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def normal(shape: Sequence[int], purpose: str, *numbers: int) -> Tensor:
    """Standard normal numbers, the same for purpose and numbers; drawn on the CPU, for a GPU's generator gives others."""
    generator = torch.Generator().manual_seed(derive(purpose, *numbers))
    with drawing():
        return torch.randn(shape, generator=generator, device="cpu")


@contextlib.contextmanager
def generators(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators for the CPU and for `device`, seeded, and put back afterwards."""
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    # `torch.manual_seed` would also seed GPUs other than this rank's, and put none of them back.
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


#: Which it is -> its state, which a draw changes.
GENERATORS: tuple[tuple[str, Callable[[], Hashable]], ...] = (
    ("Python's `random`", random.getstate),
    ("numpy's random numbers", _numpy_state),
)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Both are put back when the block ends."""
    own, numpy = random.getstate(), sys.modules.get("numpy")
    others = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(others)


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
