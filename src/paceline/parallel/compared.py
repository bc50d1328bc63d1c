"""A script's first steps, kept to be compared with those of another number of workers: the workers' side of `paceline check`.

    paceline check ── run 1: one process ── its first values, and losses and state after three steps ── a file
                   └─ run 2: N workers ──── begin with those values, compare with that file ── what came of it, JSON

The script is the user's own. Once it has made its steps it ends, with exit code 0. Both runs compute in float64, where
rounding hides nothing, and with fixed numbers in place of torch's random ones (`steady`).

Loaded on use: it imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel import strategy as strategies
from paceline.parallel.batches.batch import Parts
from paceline.parallel.check import Narrowest
from paceline.parallel.checkpoint.store import full_state_dict
from paceline.parallel.deterministic_rng import Steady
from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import map_tensors

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle


#: By how far losses and parameters may differ. In float32 losses are compared alone: AdamW makes a whole step of the rounding
#: error of a gradient that is 0 in truth.
LIMITS = {"float64": 1e-9, "own": 1e-4}
#: So many rounding errors of the narrowest type in which a float64 model computes a part of itself.
ROUNDINGS = 50

VARIABLE = "PACELINE_CHECK"
#: In the run's outputs.
FOLDER, VALUES, OUTCOME = "check", "values.pt", "outcome.json"

_NARROW = {torch.bfloat16, torch.float16, torch.float32}
_BY_NAME: Any = (Tensor.bfloat16, Tensor.half, Tensor.float)


class Comparison:
    """One script's first training, watched. Only the first `parallelize` of a script is."""

    _begun = False

    def __init__(self, asked: StepsAsked) -> None:
        self._asked = asked
        self._losses: list[float] = []
        self._first: dict[str, Tensor] = {}
        #: How much larger the parameters are here than in the script's own type.
        self._widened = 1.0
        self._narrowest = Narrowest()  # type: ignore[no-untyped-call]

    @classmethod
    def begin(cls) -> Comparison | None:
        """The comparison that this process belongs to, at the first call; None where there is none."""
        asked = StepsAsked.from_environment()
        if asked is None or cls._begun:
            return None
        cls._begun = True
        return cls(asked)

    def prepare(self, model: nn.Module) -> None:
        """The model in the type, and with the values, that both runs begin with. Before it is cut."""
        if self._asked.precision == "float64":
            before = sum(param.nbytes for param in model.parameters())
            model.double()
            self._widened = sum(param.nbytes for param in model.parameters()) / max(before, 1)
        if self._asked.against is None:
            self._first = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            return
        before = self._read()["first"]
        try:
            model.load_state_dict(before)
        except RuntimeError as error:
            raise ParallelError(
                "the model that the script makes is another one on several workers than in one process: "
                f"{' '.join(str(error).split())}. Does it depend on the number of workers, or on the rank?"
            ) from error

    def strategy(self, given: object) -> object:
        """In one process there is nothing to spread, whatever sizes the script names."""
        return strategies.DataParallel() if self._asked.against is None else given

    def split(self, split: Callable[[Any], Parts]) -> Callable[[Any], Parts]:
        """Batches in the type of the comparison."""
        if self._asked.precision != "float64":
            return split

        def wide(tensor: Tensor) -> Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        def split_wide(batch: Any) -> Parts:
            return Parts(*map_tensors(tuple(split(batch)), wide))

        return split_wide

    def start(self) -> None:
        """From here on torch's random numbers are fixed ones, to the process's end."""
        self._steady = Steady()  # type: ignore[no-untyped-call]
        self._steady.__enter__()  # type: ignore[no-untyped-call]

    def watching(self) -> AbstractContextManager[Any]:
        """What a step's computation runs under."""
        return self._narrowest if self._asked.against is None else contextlib.nullcontext()

    def learning(self) -> AbstractContextManager[Any]:
        """What a step of the optimizer runs under: in float64 all of it, also what Muon computes in bfloat16 by itself."""
        return Wide() if self._asked.precision == "float64" else contextlib.nullcontext()

    def stepped(self, par: ParallelHandle, loss: float) -> None:
        """Called after each step, on all ranks; does not return from the last."""
        self._losses.append(loss)
        done = len(self._losses) >= self._asked.steps
        par.settle_buffers()
        state = full_state_dict(par) if done else {}
        if par.world.rank == 0:
            self._write(par, state, done=done)
        if done:
            sys.stdout.flush()
            sys.exit(0)

    def _read(self) -> dict[str, Any]:
        assert self._asked.against is not None
        # Written by a run of the same user, and opened as data alone.
        found: dict[str, Any] = torch.load(self._asked.against / VALUES, weights_only=True)
        return found

    def _write(self, par: ParallelHandle, state: Mapping[str, Tensor], *, done: bool) -> None:
        self._asked.folder.mkdir(parents=True, exist_ok=True)
        told: dict[str, Any] = {
            "layout": str(par.world.layout),
            "steps": len(self._losses),
            "losses": self._losses,
            "precision": self._asked.precision,
        }
        if done and self._asked.against is None:
            kept = {"first": self._first, "losses": self._losses, "after": dict(state), "eps": self._narrowest.eps}
            torch.save(kept, self._asked.folder / VALUES)
        elif done:
            told |= self._compared(self._read(), state)
        if par.memory is not None:
            told["memory"] = {
                "needed_bytes": int(par.memory.needed / self._widened),
                "free_bytes": par.memory.free + par.memory.parameters,
                "limit": par.memory.limit,
            }
        (self._asked.folder / OUTCOME).write_text(json.dumps(told))

    def _compared(self, one: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Whether losses and state are those of one process, and where they differ most."""
        is_narrow = one["eps"] > torch.finfo(torch.float64).eps
        limit = max(LIMITS[self._asked.precision], ROUNDINGS * one["eps"] if is_narrow else 0.0)
        losses = max(_apart(a, b) for a, b in zip(one["losses"], self._losses, strict=True))
        found: dict[str, Any] = {"losses_apart": losses, "limit": limit, "one_losses": one["losses"]}
        if is_narrow or self._asked.precision == "own":
            return found | {"equal": losses <= limit}
        apart = {name: _distance(value, state[name]) for name, value in one["after"].items() if name in state}
        missing = sorted(set(one["after"]) ^ set(state))
        worst = max(apart, key=lambda name: apart[name], default="")
        furthest = apart.get(worst, 0.0)
        return found | {
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
    wide = torch.complex128 if one.is_complex() else torch.float64
    far = float((one.to(wide) - other.to(wide)).abs().max()) / max(float(one.to(wide).abs().max()), 1.0)
    return float("inf") if math.isnan(far) else far


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsAsked:
    """What `paceline check` asks of a run, as JSON in a variable.

    against: where the run of one process has left its values; None: this is that run.
    folder: where this one leaves what came of it. precision: "float64", or "own" for the script's.
    """

    folder: Path
    steps: int
    precision: str
    against: Path | None = None

    @classmethod
    def from_environment(cls) -> StepsAsked | None:
        """What this process was asked; None outside of a comparison."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        given = json.loads(text)
        against = given.get("against")
        return cls(
            folder=Path(os.environ["PACELINE_OUTPUT_DIR"]) / FOLDER,
            steps=given["steps"],
            precision=given["precision"],
            against=None if against is None else Path(against),
        )


class Wide(TorchFunctionMode):
    """While it is active, a float64 tensor that is converted to a narrower type of floating point stays float64.

    The result is a copy, as the conversion's would be: what is changed in place is not the tensor itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64 and _narrows(func, args, kwargs):
            return args[0].clone()
        return func(*args, **kwargs)


def _narrows(func: Any, args: Any, kwargs: Any) -> bool:
    if func in _BY_NAME:
        return True
    return func in (Tensor.to, Tensor.type) and any(
        isinstance(one, torch.dtype) and one in _NARROW for one in (*args[1:], *kwargs.values())
    )
