"""The workers' side of `paceline check`, which compares a script's first steps in two runs.

    run 1: one process    saves its initial values, and its losses and state after some steps, in a file
    run 2: N workers      starts with the initial values of run 1, compares its results, and writes a JSON report

The script is the user's own. After these steps it ends with exit code 0. If possible, both runs compute in float64,
because rounding could hide a difference. Both replace torch's random numbers by fixed numbers (`deterministic_rng`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel import strategy as strategies
from paceline.parallel.batches.batch import SplitFunction
from paceline.parallel.checkpoint.store import full_state_dict
from paceline.parallel.deterministic_rng import Steady
from paceline.parallel.errors import ParallelError
from paceline.parallel.plain_run import Narrowest
from paceline.parallel.pytree import map_tensors

if TYPE_CHECKING:
    from paceline.parallel.memory_plan import PlannedHandle


#: Precision -> largest relative difference allowed. With "own" (the script's dtype) compare only losses, not parameters.
LIMITS = {"float64": 1e-9, "own": 1e-4}
#: If a model computes partly in a narrower dtype than float64, losses may differ by this many times that dtype's eps.
ROUNDINGS = 50

VARIABLE = "PACELINE_CHECK"
#: Names in a run's outputs: the folder of `paceline check`, its file with the reference run's values, its file with the result.
FOLDER, VALUES, OUTCOME = "check", "values.pt", "outcome.json"

_NARROW = {torch.bfloat16, torch.float16, torch.float32}
_BY_NAME = (Tensor.bfloat16, Tensor.half, Tensor.float)

Chosen = strategies.Joinable | Literal["auto"]


class Comparison:
    """A comparison whose methods do nothing, for training without `paceline check`."""

    _begun = False

    @classmethod
    def begin(cls) -> Comparison:
        """Return a comparison, active only in the first training under `paceline check`."""
        request = StepsAsked.from_environment()
        if request is None or cls._begun:
            return Comparison()
        Comparison._begun = True
        return _Observed(request)

    def prepare(self, model: nn.Module) -> None:
        """Set the model's dtype and, with N workers, its initial values."""

    def strategy(self, chosen: Chosen) -> Chosen:
        """Return the script's strategy, or DataParallel() in the run of one process."""
        return chosen

    def split(self, split: SplitFunction) -> SplitFunction:
        """Wrap the user's `split` so that it converts batches to the comparison's dtype."""
        return split

    def start(self) -> None:
        """Replace torch's random numbers by fixed ones until the process ends."""

    def watching(self) -> AbstractContextManager[object]:
        """Return a context for each step, which records its least precise dtype."""
        return contextlib.nullcontext()

    def learning(self) -> AbstractContextManager[object]:
        """Return the context manager within which the optimizer steps.

        In a float64 comparison it keeps the optimizer in float64, including the parts that Muon computes in bfloat16.
        """
        return contextlib.nullcontext()

    def stepped(self, par: PlannedHandle, loss: Tensor) -> None:
        """Record a step's loss. After the last compared step, end the process."""


class _Observed(Comparison):
    """The comparison of the script's first training under `paceline check`."""

    def __init__(self, steps: StepsAsked) -> None:
        self._asked = steps
        self._losses: list[float] = []
        self._first: dict[str, Tensor] = {}
        #: The size of this run's parameters in bytes, divided by their size in the dtype that the script chose.
        self._widened = 1.0
        self._narrowest = Narrowest()  # type: ignore[no-untyped-call]

    def prepare(self, model: nn.Module) -> None:
        if self._asked.precision == "float64":
            before = sum(param.nbytes for param in model.parameters())
            model.double()
            self._widened = sum(param.nbytes for param in model.parameters()) / max(before, 1)
        if self._asked.against is None:
            self._first = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            return
        try:
            model.load_state_dict(self._read()["first"])
        except RuntimeError as error:
            raise ParallelError(
                "the model that the script makes is another one on several workers than in one process: "
                f"{' '.join(str(error).split())}. Does it depend on the number of workers, or on the rank?"
            ) from error

    def strategy(self, chosen: Chosen) -> Chosen:
        return strategies.DataParallel() if self._asked.against is None else chosen

    def split(self, split: SplitFunction) -> SplitFunction:
        if self._asked.precision != "float64":
            return split

        def wide(tensor: Tensor) -> Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        return lambda batch: map_tensors(split(batch), wide)

    def start(self) -> None:
        self._steady = Steady()  # type: ignore[no-untyped-call]
        self._steady.__enter__()  # type: ignore[no-untyped-call]

    def watching(self) -> AbstractContextManager[object]:
        return self._narrowest if self._asked.against is None else contextlib.nullcontext()

    def learning(self) -> AbstractContextManager[object]:
        return Wide() if self._asked.precision == "float64" else contextlib.nullcontext()

    def stepped(self, par: PlannedHandle, loss: Tensor) -> None:
        with par.watch.guard("the comparison"):
            self._losses.append(float(loss))
            done = len(self._losses) >= self._asked.steps
            par.settle_buffers()
            state = full_state_dict(par) if done else {}
            if par.world.rank == 0:
                self._write(par, state, done=done)
            if done:
                sys.stdout.flush()
                sys.exit(0)

    def _read(self) -> _Values:
        assert self._asked.against is not None
        # `weights_only` makes torch refuse to run code from the file. This is a precaution: the same user's run wrote the file.
        values: _Values = torch.load(self._asked.against / VALUES, weights_only=True)
        return values

    def _write(self, par: PlannedHandle, state: Mapping[str, Tensor], *, done: bool) -> None:
        self._asked.folder.mkdir(parents=True, exist_ok=True)
        outcome: dict[str, object] = {
            "layout": str(par.world.layout),
            "steps": len(self._losses),
            "losses": self._losses,
            "precision": self._asked.precision,
        }
        if done and self._asked.against is None:
            kept: _Values = {
                "first": self._first,
                "losses": self._losses,
                "after": dict(state),
                "eps": self._narrowest.eps,
            }
            torch.save(kept, self._asked.folder / VALUES)
        elif done:
            outcome |= self._compared(self._read(), state)
        if par.memory is not None:
            outcome["memory"] = {
                "needed_bytes": int(par.memory.needed / self._widened),
                "free_bytes": par.memory.free + par.memory.parameters,
                "limit": par.memory.limit,
            }
        (self._asked.folder / OUTCOME).write_text(json.dumps(outcome))

    def _compared(self, one: _Values, state: Mapping[str, Tensor]) -> dict[str, object]:
        """Return the difference from the run of one process, for the report.

        `one` has that run's values, and `state` this run's final parameters and buffers.
        """
        is_narrow = one["eps"] > torch.finfo(torch.float64).eps
        limit = max(LIMITS[self._asked.precision], ROUNDINGS * one["eps"] if is_narrow else 0.0)
        losses = max(_apart(a, b) for a, b in zip(one["losses"], self._losses, strict=True))
        outcome: dict[str, object] = {"losses_apart": losses, "limit": limit, "one_losses": one["losses"]}
        if is_narrow or self._asked.precision == "own":
            return outcome | {"equal": losses <= limit}
        apart = {name: _distance(value, state[name]) for name, value in one["after"].items() if name in state}
        missing = sorted(set(one["after"]) ^ set(state))
        worst = max(apart, key=lambda name: apart[name], default="")
        furthest = apart.get(worst, 0.0)
        return outcome | {
            "parameters_apart": furthest,
            "parameter": worst,
            "missing": missing,
            "equal": losses <= limit and furthest <= limit and not missing,
        }


def _apart(one: float, other: float) -> float:
    far = abs(one - other) / max(abs(one), 1.0)
    return float("inf") if math.isnan(far) else far


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    first, second = (tensor.to(torch.promote_types(tensor.dtype, torch.float64)) for tensor in (one, other))
    far = float((first - second).abs().max()) / max(float(first.abs().max()), 1.0)
    return float("inf") if math.isnan(far) else far


class _Values(TypedDict):
    """The results of the run of one process, as saved in a file."""

    first: dict[str, Tensor]
    losses: list[float]
    after: dict[str, Tensor]
    eps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsAsked:
    """The request of `paceline check` to compare some steps.

    Attributes:
        against: The folder with the results of the run of one process. None in that run itself.
        folder: The folder in which this run writes its results.
        precision: "float64", or "own" for the script's dtype.
    """

    folder: Path
    steps: int
    precision: str
    against: Path | None = None

    @classmethod
    def from_environment(cls) -> StepsAsked | None:
        """Return the request, or None in a run without `paceline check`."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        request = json.loads(text)
        against = request.get("against")
        return cls(
            folder=Path(os.environ["PACELINE_OUTPUT_DIR"]) / FOLDER,
            steps=request["steps"],
            precision=request["precision"],
            against=None if against is None else Path(against),
        )


class Wide(TorchFunctionMode):
    """A torch function mode that keeps float64 tensors in float64.

    A conversion to a narrower float returns a float64 copy instead, so that in-place changes do not reach the original.
    Muon, for example, converts each matrix to bfloat16 in its Newton-Schulz iteration. The rounding errors would hide a
    difference in a float64 comparison.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        match args:
            case (Tensor(dtype=torch.float64) as first, *others) if _narrows(func, (*others, *kwargs.values())):
                return first.clone()
        return func(*args, **kwargs)


def _narrows(func: Callable[..., object], options: Sequence[object]) -> bool:
    converts = any(isinstance(option, torch.dtype) and option in _NARROW for option in options)
    return func in _BY_NAME or (func in (Tensor.to, Tensor.type) and converts)
