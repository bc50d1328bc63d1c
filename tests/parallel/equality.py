"""One process and many, side by side: the same model, the same batches, and how far apart they end. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.parallel.training import Parallel
from tests.parallel.models import Case


@dataclass
class Outcome:
    """What came of some steps. Names are the original ones; of a rank, those that it holds."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-1)


def made(case: Case, dtype: torch.dtype, seed: int = 5) -> nn.Module:
    """The case's model with the weights of this seed."""
    torch.manual_seed(seed)
    return case.make().to(dtype)


def batches(case: Case, dtype: torch.dtype, rows: Sequence[int], seed: int = 7) -> list[tuple[Any, ...]]:
    """A global batch of each number of rows."""
    torch.manual_seed(seed)
    return [
        tuple(part.to(dtype) if part.is_floating_point() else part for part in case.batch(number)) for number in rows
    ]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A training, on one process or on many. model: None for the case's own."""

    dtype: torch.dtype = torch.float64
    microbatches: int = 1
    rows: Sequence[int] = (8,) * 3
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    clip_norm: float | None = None
    model: nn.Module | None = None

    def model_of(self, case: Case) -> nn.Module:
        return made(case, self.dtype) if self.model is None else self.model


_Found = TypeVar("_Found")


def of_first_rank(compute: Callable[[], _Found]) -> _Found:
    """What the first rank computes, on all of them: a reference that takes no other ranks' time. Called on all ranks."""
    if not dist.is_initialized():
        return compute()
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]  # type: ignore[return-value]


def alone(case: Case, **options: Any) -> Outcome:
    """A plain loop in one process that accumulates over the microbatches; no code of ours. options: those of `Steps`.

    Called on all ranks.
    """
    return of_first_rank(lambda: _alone(case, **options))


def _alone(case: Case, **options: Any) -> Outcome:
    steps = Steps(**options)
    model = steps.model_of(case)
    opt = steps.optimizer(model)
    outcome = Outcome()
    for x, y in batches(case, steps.dtype, steps.rows):
        opt.zero_grad()
        weigh = case.loss_weight or len
        whole = float(weigh(y))
        loss_sum = 0.0
        for x_part, y_part in zip(x.tensor_split(steps.microbatches), y.tensor_split(steps.microbatches), strict=True):
            share = float(weigh(y_part)) / whole if len(y_part) else 0.0
            if len(y_part) == 0:
                continue
            loss = case.loss(model(x_part), y_part) * share
            if share == 0.0:
                continue
            loss.backward()
            loss_sum += float(loss.detach())
        if steps.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), steps.clip_norm)
        opt.step()
        outcome.losses.append(loss_sum)
    outcome.gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    outcome.parameters = {name: param.detach() for name, param in model.named_parameters()}
    outcome.buffers = dict(model.named_buffers())
    return outcome


def together(case: Case, strategy: Any, **options: Any) -> Outcome:
    """Train the same with Paceline, on the ranks of this world. options: those of `Steps`, the others of `parallelize`.

    Without the comparison in the first step, a fourth of the time, unless requested: this test compares more.
    """
    own = {one.name for one in fields(Steps)}
    options = {"check": "off"} | options
    steps = Steps(**{name: value for name, value in options.items() if name in own})
    model = steps.model_of(case)
    given = batches(case, steps.dtype, steps.rows)
    par = paceline.parallelize(
        model,
        steps.optimizer(model),
        given,
        loss=case.loss,
        loss_weight=case.loss_weight,
        strategy=strategy,
        microbatches=steps.microbatches,
        clip_norm=steps.clip_norm,
        **{name: value for name, value in options.items() if name not in own},
    )
    outcome = Outcome()
    for batch in given:
        outcome.losses.append(float(par.step(batch)))
    read(par, outcome)
    return outcome


def read(par: Parallel, outcome: Outcome) -> None:
    """Read this rank's values after the last step, joined if they are sharded."""
    for name, param in par.executor.named_parameters().items():
        outcome.parameters[name] = whole(param).detach()
        if param.grad is not None:
            outcome.gradients[name] = whole(param.grad)
    outcome.buffers = dict(par.module.named_buffers())


def whole(tensor: Tensor) -> Tensor:
    """Of a DTensor, all of it: called on all ranks that hold a part."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()  # type: ignore[no-any-return]


def assert_equal(
    one: Outcome,
    many: Outcome,
    *,
    loss: float,
    gradient: float | None = None,
    parameter: float | None = None,
    buffer: float | None = None,
) -> None:
    """Every value of `many` within these distances of the same in `one`, and each of `one` on some rank; None: not looked at."""
    far = [abs(a - b) for a, b in zip(one.losses, many.losses, strict=True)]
    assert max(far) <= loss, f"losses {one.losses} and {many.losses}"
    for what, limit in (("gradients", gradient), ("parameters", parameter), ("buffers", buffer)):
        if limit is None:
            continue
        left, right = getattr(one, what), getattr(many, what)
        everyone: list[Any] = [set(right)]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, set(right))
        missing = set(left) ^ set().union(*everyone)
        assert not missing, f"{what} on one side alone: {sorted(missing)}"
        for name, value in right.items():
            assert value.shape == left[name].shape, f"{what} {name}: {value.shape} and {left[name].shape}"
            apart = float((value.cpu().double() - left[name].cpu().double()).abs().max()) if value.numel() else 0.0
            assert apart <= limit, f"{what} {name} differs by {apart:g}, more than {limit:g}"
