"""What the outer forward reads beside its arguments is followed when the loop changes it, or refused with its line."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel, WorkerError
from paceline.parallel.tracing.reads import plain_attributes
from tests.parallel.world import Ranks

SIZES = (2, 4)

TEMPERATURE = 1.0
SETTINGS = {"temperature": 1.0, "unread": 0}


class Settings:
    temperature = 1.0


@dataclass
class Config:
    temperature: float = 1.0
    inner: dict[str, Any] = field(default_factory=lambda: {"power": [1.0]})


class Chain(nn.Module):
    """Four blocks; a subclass defines the steps between them."""

    kind_scale = 1.0

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(width, 3)
        self.temperature = 1.0
        self.config = Config()
        self.namespace = SimpleNamespace(temperature=1.0)
        self.mask = torch.ones(width)
        self.active = [0, 1, 2, 3]
        self.chosen: list[nn.Module] = list(self.blocks)
        self.weights = np.ones(width)
        self.activation: Callable[[Tensor], Tensor] = torch.sigmoid
        self.last: Tensor | None = None
        self.generator = np.random.default_rng(0)
        self.calls = 0

    def between(self, x: Tensor) -> Tensor:
        return x

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(x))


def chain(**methods: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A `Chain` with these methods."""
    return type("Made", (Chain,), methods)


class _Context:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.layer = 0


class _Counts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, context: _Context) -> Tensor:
        context.layer += 1
        return torch.tanh(self.inner(x)) * context.layer


class _Keeps(_Counts):
    def forward(self, x: Tensor, context: _Context) -> Tensor:
        context.kept.append(x)
        return torch.tanh(self.inner(x)) + sum(context.kept)


class _Looks(_Counts):
    def forward(self, x: Tensor, context: _Context) -> Tensor:
        return torch.tanh(self.inner(x)) * context.layer


def _with_context(kind: type[_Counts], is_numbered: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        def through(self: Any, x: Tensor) -> Tensor:
            context = _Context()
            for index, block in enumerate(self.blocks):
                if is_numbered:
                    context.layer = index
                x = block(x, context)
            return x

        model = chain(through=through)()
        model.blocks = nn.ModuleList([kind(8) for _ in range(4)])
        return model

    return make


def _enclosed() -> tuple[Callable[[], nn.Module], Callable[[Any, int], None]]:
    temperature = 1.0

    def between(self: Any, x: Tensor) -> Tensor:
        return x / temperature

    def change(model: Any, step: int) -> None:
        nonlocal temperature
        temperature = _value(step)

    return chain(between=between), change


def _value(step: int) -> float:
    return (1.0, 0.5, 2.0, 2.0)[step]


def _set_global(model: Any, step: int) -> None:
    global TEMPERATURE
    TEMPERATURE = _value(step)


def _nothing(model: Any, step: int) -> None:
    pass


def _remember(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
    if self.last is not None:
        x = x + self.last.mean()
    self.last = x.detach()
    return x


def _layers(self: Any, x: Tensor) -> Tensor:
    for index in self.active:
        x = self.blocks[index](x)
    return x


def _modules(self: Any, x: Tensor) -> Tensor:
    for block in self.chosen:
        x = block(x)
    return x


def _count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x / self.calls


#: Kind of read -> (function that makes the model, function that the training loop calls before each step).
FOLLOWED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], None]]] = {
    "attribute": (
        chain(between=lambda self, x: x / self.temperature),
        lambda model, step: setattr(model, "temperature", _value(step)),
    ),
    "attribute of the class": (
        chain(between=lambda self, x: x / self.kind_scale),
        # Don't set it on `type(model)`, because FSDP replaces the class of a model, but not the class of the plain model.
        lambda model, step: setattr(Chain, "kind_scale", _value(step)),
    ),
    "attribute that is not there at first": (
        chain(between=lambda self, x: x / getattr(self, "later", 1.0)),
        lambda model, step: setattr(model, "later", _value(step)) if step else None,
    ),
    "config's attribute": (
        chain(between=lambda self, x: x / self.config.temperature),
        lambda model, step: setattr(model.config, "temperature", _value(step)),
    ),
    "list in a dict of a config": (
        chain(between=lambda self, x: x / self.config.inner["power"][0]),
        lambda model, step: model.config.inner["power"].__setitem__(0, _value(step)),
    ),
    "config that is replaced": (
        chain(between=lambda self, x: x / self.config.temperature),
        lambda model, step: setattr(model, "config", dataclasses.replace(model.config, temperature=_value(step))),
    ),
    "namespace": (
        chain(between=lambda self, x: x / self.namespace.temperature),
        lambda model, step: setattr(model.namespace, "temperature", _value(step)),
    ),
    "global number": (chain(between=lambda self, x: x / TEMPERATURE), _set_global),
    "global dict": (
        chain(between=lambda self, x: x / SETTINGS["temperature"]),
        lambda model, step: SETTINGS.update(temperature=_value(step), unread=step),
    ),
    "global class": (
        chain(between=lambda self, x: x / Settings.temperature),
        lambda model, step: setattr(Settings, "temperature", _value(step)),
    ),
    "closure": _enclosed(),
    "tensor that is replaced": (
        chain(between=lambda self, x: x * self.mask),
        lambda model, step: setattr(model, "mask", torch.full((8,), _value(step), dtype=torch.float64)),
    ),
    "tensor that is changed in place": (
        chain(between=lambda self, x: x * self.mask),
        lambda model, step: model.mask.fill_(_value(step)),
    ),
    "array": (
        chain(between=lambda self, x: x * float(self.weights[0])),
        lambda model, step: model.weights.fill(_value(step)),
    ),
    "function": (
        chain(between=lambda self, x: self.activation(x)),
        lambda model, step: setattr(model, "activation", (torch.sigmoid, torch.tanh, F.softplus, F.silu)[step]),
    ),
    "layers by number": (
        chain(through=_layers),
        lambda model, step: model.active.__setitem__(slice(None), [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2], [1, 2]][step]),
    ),
    "layers themselves": (
        chain(through=_modules),
        lambda model, step: setattr(model, "chosen", list(model.blocks)[step % 2 :]),
    ),
    "attribute of a block": (
        chain(through=lambda self, x: Chain.through(self, x) * self.blocks[3].gain),
        lambda model, step: setattr(model.blocks[3], "gain", _value(step)),
    ),
}

#: Kinds of reads that are also tested on four workers: one for each way in which a model reads a value.
_ON_FOUR = (
    "attribute",
    "global number",
    "closure",
    "tensor that is replaced",
    "layers by number",
    "attribute of a block",
)

#: Kinds of reads of a number, which one model can combine. `make test` trains this model, and changes one of the
#: numbers before each step. `make proof` also trains a separate model for each of these reads.
_NUMBERS = (
    *("attribute", "attribute of the class", "attribute that is not there at first", "config's attribute"),
    *("list in a dict of a config", "config that is replaced", "namespace", "global number", "global dict"),
    *("global class", "tensor that is changed in place", "array"),
)


_ALL = "numbers, one after the other"


def _all_numbers() -> tuple[Callable[[], nn.Module], Callable[[Any, int], None]]:
    parts = [FOLLOWED[name] for name in _NUMBERS]

    def change(model: Any, step: int) -> None:
        for _, one in parts if step == 0 else parts[step - 1 : step]:
            one(model, min(step, 1))

    def through(self: Any, x: Tensor) -> Tensor:
        x = Chain.through(self, x)
        for make, _ in parts:
            x = make.between(self, x)  # type: ignore[attr-defined]
        return x

    return chain(through=through), change


#: Kind of read that a pipeline refuses -> (function that makes the model, part of the error message).
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "numpy's random numbers": (
        chain(between=lambda self, x: x * float(np.random.rand() + 0.5)),
        r"reads\.py:\d+: `.*np\.random\.rand.*numpy's random numbers",
    ),
    "a generator of numpy's": (
        chain(between=lambda self, x: x * float(self.generator.random() + 0.5)),
        r"reads\.py:\d+: `.*self\.generator\.random.*'generator'",
    ),
    "Python's random numbers": (
        chain(between=lambda self, x: x * (random.random() + 0.5)),
        r"reads\.py:\d+: `.*random\.random.*Python's `random`",
    ),
    "the time": (
        chain(between=lambda self, x: x * (1 + time.perf_counter() % 1e-3)),
        r"reads\.py:\d+: `.*perf_counter.*a second call with the same shapes does something else",
    ),
    "what an earlier call has left": (chain(through=_remember), r"reads\.py:\d+: `self\.last = .*'last'"),
    "a number of calls": (chain(between=_count), r"reads\.py:\d+: `self\.calls \+= 1.*'calls'"),
    "an object on which blocks count": (
        _with_context(_Counts),
        r"reads\.py:\d+: `x = block\(x, context\)`.*blocks\.0 changes the _Context",
    ),
    "an object that keeps blocks' tensors": (
        _with_context(_Keeps),
        r"reads\.py:\d+: `x = block\(x, context\)`.*blocks\.0 changes the _Context",
    ),
    "an object that is changed between blocks": (
        _with_context(_Looks, is_numbered=True),
        r"reads\.py:\d+: `x = block\(x, context\)`.*the _Context that is passed on there is changed later",
    ),
}

STEPS = 3


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    model = make().double()
    model.mask = model.mask.double()
    model.blocks[3].gain = 1.0
    return model


def _batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(steps)]


def _alone(make: Callable[[], nn.Module], change: Callable[[Any, int], None], steps: int = STEPS) -> nn.Module:
    model = _made(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(_batches(steps)):
        change(model, step)
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.cross_entropy(model(x_part), y_part) / 2).backward()
        optimizer.step()
    return model


def _together(
    make: Callable[[], nn.Module],
    change: Callable[[Any, int], None],
    strategy: Any,
    *,
    steps: int = STEPS,
    **options: Any,
) -> tuple[Any, nn.Module]:
    model = _made(make)
    change(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = _batches(steps)
    par = paceline.parallelize(
        model, optimizer, given, loss=F.cross_entropy, strategy=strategy, microbatches=2, find_unused=True, **options
    )
    for step, batch in enumerate(given):
        change(model, step)
        par.step(batch)
    return par, model


def _assert_same(name: str, strategy: Any, one: nn.Module, par: Any) -> None:
    many = par.full_state_dict()
    for key, value in one.state_dict().items():
        apart = float((value.cpu() - many[key].cpu()).abs().max())
        assert apart < 1e-10, f"{name} on {strategy}: {key} differs by {apart:g}"


def _check(name: str, par: Any) -> None:
    try:
        par.check(_batches()[0])
    except ParallelError as error:
        raise AssertionError(f"{name} on {par.world.layout}: {error}") from error


def check_pipeline_uses_values_that_the_loop_changes_between_steps(ranks: Ranks) -> None:
    # Cut each model before `blocks.2`, because this block always runs, whichever other layers the model chooses.
    cut = PipelineParallel(2, cut=["blocks.2"])
    pipelines = [cut] if ranks.size == 2 else [DataParallel(2) @ cut]
    # Two workers test every kind of read. Four workers test some kinds, and that the replicas agree on a changed value.
    chosen = dict(FOLLOWED) if ranks.size == 2 else {name: FOLLOWED[name] for name in _ON_FOUR}
    if not ranks.is_whole:
        chosen = {name: one for name, one in chosen.items() if name not in _NUMBERS} | {_ALL: _all_numbers()}
    compared = ranks.cells([_ALL, *_ON_FOUR], list(FOLLOWED))
    for name, (make, change) in chosen.items():
        # `make test` changes the value once, and `make proof` changes it again.
        steps = 1 + len(_NUMBERS) if name == _ALL else ranks.cells(2, STEPS)
        one = _alone(make, change, steps)
        for strategy in pipelines:
            par, _ = _together(make, change, strategy, steps=steps, check="off")
            _assert_same(name, strategy, one, par)
            # Also compare with the plain model, which must use the changed values.
            if name in compared:
                _check(name, par)


def check_other_strategies_use_values_that_the_loop_changes_between_steps(
    ranks: Ranks, sizes: tuple[int, ...] = (2,)
) -> None:
    # These layouts run the model itself and trace nothing, so each kind of read is tested on one of the layouts in turn.
    for name, layouts in ranks.grid(
        ranks.cells(list(_ON_FOUR), list(FOLLOWED)), (DataParallel(), FullyShard(), TensorParallel())
    ):
        make, change = FOLLOWED[name]
        one = _alone(make, change)
        for strategy in layouts:
            if name.startswith("layers") and isinstance(strategy, type(TensorParallel())):
                # TensorParallel cuts these layers as a pair, so the loop can't skip one of them.
                continue
            par, _ = _together(make, change, strategy, check="off")
            _assert_same(name, strategy, one, par)
            _check(name, par)


def check_model_state_that_a_pipeline_cannot_track_is_refused_with_its_line(
    ranks: Ranks, sizes: tuple[int, ...] = (2,)
) -> None:
    for make, said in REFUSED.values():
        with pytest.raises(ParallelError, match=f"(?s){said}"):
            _together(make, _nothing, PipelineParallel())


def check_different_attribute_values_on_two_ranks_are_refused(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    make, change = FOLLOWED["attribute"]
    par, model = _together(make, change, PipelineParallel(), check="off")
    model.temperature = 1.0 + ranks.rank

    with pytest.raises(ParallelError, match="rank 0 and rank 1 do not compute the same model"):
        par.step(_batches()[0])


def check_attributes_added_by_fsdp_are_ignored(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    model = Chain()
    before = [set(plain_attributes(module)) for module in model.modules()]
    par = paceline.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, strategy=FullyShard(), check="off"
    )
    assert any(isinstance(module, FSDPModule) for module in par.module.modules())
    assert [set(plain_attributes(module)) for module in par.module.modules()] == before


def check_different_attribute_values_on_stages_or_replicas_are_refused(
    ranks: Ranks, sizes: tuple[int, ...] = (4,)
) -> None:
    make, change = FOLLOWED["attribute"]
    # Replicas may get different numbers of rows. That does not count as a difference.
    uneven = [(x[:7], y[:7]) for x, y in _batches()]
    # Functions that select the ranks with another value: one whole replica, one stage of both replicas, or rank 1
    # alone. Checks on two workers cover different stages of one replica.
    covering: list[Callable[[int], bool]] = [lambda rank: rank >= 2]
    for is_other in ranks.cells(covering, [*covering, lambda rank: rank % 2 == 1, lambda rank: rank == 1]):
        par, model = _together(make, change, DataParallel(2) @ PipelineParallel(2, cut=["blocks.2"]), check="off")
        par.step(uneven[0])
        model.temperature = 2.0 if is_other(ranks.rank) else 1.0

        def train(par: Any = par) -> None:
            for _ in range(8):
                par.step(uneven[0])

        with pytest.raises(ParallelError, match="do not compute the same model: a value that its forward reads"):
            train()


def check_replaced_buffer_is_refused(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    def make() -> nn.Module:
        model = chain(between=lambda self, x: x * self.gains)()
        model.register_buffer("gains", torch.ones(8, dtype=torch.float64))
        model.blocks[1][0].register_buffer("unread", torch.ones(1))
        return model

    def fill(model: Any, step: int) -> None:
        model.gains.fill_(_value(step))
        # Only the stage with this block reads the buffer, so the loop may replace it.
        model.blocks[1][0].unread = torch.full((1,), float(step))

    one = _alone(make, fill)
    par, model = _together(make, fill, PipelineParallel())
    _assert_same("buffer", "pipe", one, par)
    before: Any = model.gains
    model.gains = torch.zeros(8, dtype=torch.float64)
    with pytest.raises(ParallelError, match=r"the buffer gains after the model was cut.*model\.gains\.copy_\(new\)"):
        par.step(_batches()[0])
    model.gains = before
    par.step(_batches()[0])


class _GoesThroughASet(nn.Module):
    """As models of transformers do with the kinds of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = {kind: x * len(kind) for kind in {"a" * count for count in range(1, 9)}}
        x = self.first(x)
        for count in range(1, 9):
            x = x + made["a" * count]
        return self.last(x)


def check_different_set_order_on_the_ranks_is_named_in_the_error(ranks: Ranks, sizes: Any = (2,)) -> None:
    torch.manual_seed(3)
    model = _GoesThroughASet()
    batch = torch.randn(8, 12), torch.randint(0, 5, (8,))
    par = paceline.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [batch],
        loss=F.cross_entropy,
        strategy=PipelineParallel(cut=["last"]),
        microbatches=2,
    )
    orders: list[Any] = [None] * ranks.size
    torch.distributed.all_gather_object(orders, list({"a" * count for count in range(1, 9)}))
    if len({tuple(order) for order in orders}) == 1:
        par.step(batch)
        return
    with pytest.raises((ParallelError, WorkerError), match="PYTHONHASHSEED=0"):
        par.step(batch)
