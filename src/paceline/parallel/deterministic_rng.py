"""Random numbers that are reproducible in each layout, or fixed to compare layouts.

`Streams` starts each step with a seed derived from (seed, step, replica, stage). So two runs draw the same numbers, and
a resumed run draws the numbers of a run without interruption. Replicas and stages draw different numbers. The ranks of
a tensor group compute the same rows together, and draw the same numbers. After a step torch's generators have their
former states. A single process draws from torch's generators, as a plain loop does. So with dropout, the results of a
step differ between layouts, but not between two runs in one layout.

`Steady` replaces each random number by a fixed one, to compare two layouts: dropout keeps every value, and noise is a constant.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from paceline.torch_private import DispatchMode

if TYPE_CHECKING:
    from paceline.torch_private import Operation

_Args = tuple[Any, ...]
_Options = dict[str, Any]


class RandomState(TypedDict, total=False):
    """The random state in a checkpoint: a seed, and a single process's generator states."""

    seed: int
    cpu: Tensor
    cuda: Tensor


class OrderState(TypedDict):
    """The order of the samples in a checkpoint: its seed, the dataset's length and the sampler's class."""

    seed: int
    length: int | str
    sampler: str


class Streams:
    """This rank's random number streams, each with its own seed.

    If `active` is False (a single process), the methods leave torch's generators alone.
    """

    def __init__(self, *, seed: int, replica: int, stage: int, device: torch.device, active: bool) -> None:
        self.seed = seed
        self._replica = replica
        self._stage = stage
        self._device = device
        self._active = active

    @contextlib.contextmanager
    def use(self, purpose: str, number: int) -> Iterator[None]:
        """Within the block, seed torch's random numbers for a purpose and a number.

        The seed also depends on the run's seed, the replica and the stage. `purpose` names a use of random numbers, and
        `number` counts its calls. A single process draws from torch's own generators.
        """
        if not self._active:
            yield
            return
        # Each step starts a new stream of random numbers. So a resumed run draws the same numbers as a run without a break.
        seed = derive(purpose, self.seed, number, self._replica, self._stage)
        with generators(seed, self._device):
            yield

    def state_dict(self) -> RandomState:
        """Return the streams' state for a checkpoint."""
        state: RandomState = {"seed": self.seed}
        if not self._active:
            state["cpu"] = torch.get_rng_state()
            if self._device.type == "cuda":
                state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: RandomState) -> None:
        """Restore the seed, and in a single process torch's generators."""
        self.seed = int(state["seed"])
        if not self._active and "cpu" in state:
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)


def derive(purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed computed from the purpose and the numbers.

    The result must never change: a run resumed from an old checkpoint needs the same seeds.
    """
    text = f"paceline stream 1 {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def normal(shape: Sequence[int], purpose: str, *numbers: int) -> Tensor:
    """Draw standard normal numbers on the CPU, seeded by the other arguments.

    A GPU's generator would give different numbers.
    """
    generator = torch.Generator().manual_seed(derive(purpose, *numbers))
    with drawing():
        return torch.randn(shape, generator=generator, device="cpu")


@contextlib.contextmanager
def generators(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block, seed torch's generators of the CPU and of `device`."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        # Don't call `torch.manual_seed`, because it would also seed GPUs on which other ranks run.
        torch.default_generator.manual_seed(seed)
        for _ in gpus:
            torch.cuda.manual_seed(seed)
        yield


def numpys_random() -> list[Any]:
    """Return numpy's generators: [numpy.random], or [] if numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [numpy.random]


def _numpy_state() -> Hashable:
    states = [generator.get_state(legacy=False)["state"] for generator in numpys_random()]
    return tuple((state["key"].tobytes(), state["pos"]) for state in states)


#: Random generators of other libraries: (name, function that returns the generator's state). Each draw changes the state.
GENERATORS: tuple[tuple[str, Callable[[], Hashable]], ...] = (
    ("Python's `random`", random.getstate),
    ("numpy's random numbers", _numpy_state),
)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of Python and numpy after the block."""
    own, numpys = random.getstate(), numpys_random()
    others = [generator.get_state() for generator in numpys]
    try:
        yield
    finally:
        random.setstate(own)
        for generator, state in zip(numpys, others, strict=True):
            generator.set_state(state)


class Steady(DispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode in which random operations return fixed numbers.

    The mode acts below autograd and composite functions, so it includes dropout within attention. It cannot change numbers that
    a kernel draws internally, as cuDNN's recurrent layers do. To find such layers, compare `states` before and after.
    """

    #: If True, operations draw random numbers as usual, although this mode is active. The function `drawing` sets this flag.
    draws = False

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: _Args = (), kwargs: _Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if Steady.draws:
            return func(*args, **kwargs)
        name, place = _known(func)
        # torch calls this method for every operation. Replace all operations that do nothing but draw random numbers.
        if name in _FIXED:
            return _FIXED[name](args, kwargs)
        # A fused kernel, such as attention, draws numbers internally. So set its argument for the dropout probability to 0.
        if place is None:
            return func(*args, **kwargs)
        if place < len(args):
            return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return func(*args, **kwargs | {"dropout_p": 0.0})


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Within the block, let operations draw random numbers although `Steady` fixes them."""
    before, Steady.draws = Steady.draws, True
    try:
        yield
    finally:
        Steady.draws = before


def states(device: torch.device) -> tuple[Hashable, ...]:
    """Return hashable states of torch's, Python's and numpy's random generators."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    own = (hash(state.cpu().numpy().tobytes()) for state in (torch.get_rng_state(), *cuda))
    return (*own, *(state() for _, state in GENERATORS))


@cache
def _known(func: Operation) -> tuple[str, int | None]:
    names = [argument.name for argument in func._schema.arguments]
    return str(func.overloadpacket), names.index("dropout_p") if "dropout_p" in names else None


def _at(args: _Args, kwargs: _Options, place: int, name: str, default: float) -> float:
    value = [*args[place : place + 1], kwargs.get(name)][0]
    return default if value is None else float(value)


def _dropout(args: _Args, kwargs: _Options) -> tuple[Tensor, Tensor]:
    x, p = args[0], float(args[1])
    train = [*args[2:3], kwargs.get("train")][0]
    return x * (1.0 if train is False or p >= 1 else 1 / (1 - p)), torch.ones_like(x, dtype=torch.bool)


def _full(size: Sequence[int], value: float, kwargs: _Options) -> Tensor:
    options = {name: kwargs[name] for name in ("dtype", "layout", "device", "pin_memory") if name in kwargs}
    return torch.full(list(size), value, **options)


def _order(args: _Args, kwargs: _Options) -> Tensor:
    return torch.arange(args[0], dtype=kwargs.get("dtype") or torch.int64, device=kwargs.get("device"))


def _like(value: float) -> Callable[[_Args, _Options], Tensor]:
    return lambda args, kwargs: torch.full_like(args[0], value, dtype=kwargs.get("dtype"), device=kwargs.get("device"))


def _fill(value: Callable[[_Args, _Options], float]) -> Callable[[_Args, _Options], object]:
    return lambda args, kwargs: args[0].fill_(value(args, kwargs))


def _integers(args: _Args, kwargs: _Options) -> Tensor:
    # torch has two overloads: aten::randint(high, size), and aten::randint.low(low, high, size) with one more argument.
    low = int(args[0]) if len(args) > 2 else 0
    return _full(args[-1], low, kwargs | {"dtype": kwargs.get("dtype") or torch.int64})


def _chosen(args: _Args, kwargs: _Options) -> Tensor:
    # Replace multinomial: return the most probable indices first, and repeat the indices if `count` exceeds their number.
    weights, count = args[0], int(args[1])
    order = weights.argsort(-1, descending=True, stable=True)
    chosen: Tensor = order[..., torch.arange(count, device=weights.device) % weights.shape[-1]]
    return chosen


def _normal(args: _Args, kwargs: _Options) -> object:
    mean, std = args[0], [*args[1:2], kwargs.get("std", 1.0)][0]
    middle = mean + 0.5 * std
    # torch has overloads of `normal` with tensors, as in aten::normal(mean, std), and with floats and a size: (mean, std, size).
    return middle if isinstance(middle, Tensor) else _full(args[2], middle, kwargs)


_FIXED: dict[str, Callable[[_Args, _Options], object]] = {
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
    "aten.rand": lambda args, kwargs: _full(args[0], 0.5, kwargs),
    "aten.randn": lambda args, kwargs: _full(args[0], 0.5, kwargs),
    "aten.randint": _integers,
    "aten.randperm": _order,
    "aten.rand_like": _like(0.5),
    "aten.randn_like": _like(0.5),
    "aten.randint_like": _like(0),
}
