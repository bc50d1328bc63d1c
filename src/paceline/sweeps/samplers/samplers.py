"""Samplers by name, and user-defined samplers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import SweepError
from paceline.sweeps.expressions import Raw
from paceline.sweeps.samplers import optuna_sampler
from paceline.sweeps.samplers.sampler import GridSampler, Proposal, RandomSampler, Sampler
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Goal, Trial
from paceline.system.names import did_you_mean

NAMES = ("random", "grid", "tpe", "cmaes", "gp")


def check_sampler(name: object, space: Space, goals: Sequence[Goal] = ("maximize",)) -> None:
    """Raise an error unless the sampler exists and supports the space.

    Raises:
        SweepError: The sampler is unknown, not installed, or does not support this space.
    """
    if not isinstance(name, str) or (name not in NAMES and ":" not in name):
        raise SweepError(
            f"sampler={name!r}: write one of {', '.join(NAMES)}, or 'module:function' of one of your own."
            f"{did_you_mean(str(name), NAMES)}"
        )
    # Skip a user's sampler ("module:function"): the controller checks it in the source.
    if ":" not in name:
        make_sampler(name, space, 0, goals)


def make_sampler(
    name: str,
    space: Space,
    seed: int,
    goals: Sequence[Goal],
    *,
    repeats: bool = False,
    source: Path | None = None,
    prior: Sequence[Trial] = (),
    tried: Sequence[Mapping[str, Raw]] = (),
) -> Sampler:
    """Return the sampler with this name for a search space.

    `source`: Folder of a user's own sampler module. `repeats`: Whether a point may repeat.
    `prior`: Results of former sweeps, for samplers that learn.
    `tried`: The user's own points, which are tried first.

    Raises:
        SweepError: The sampler is unknown, does not support the space, or cannot be loaded.
    """
    if name == "random":
        return RandomSampler(space, seed, repeats=repeats)
    if name == "grid":
        return GridSampler(space, tried)
    if ":" in name:
        sampler = optuna_sampler.own(_loaded(name, source), space, seed, goals, prior)
    else:
        makers = {"tpe": optuna_sampler.tpe, "cmaes": optuna_sampler.cmaes, "gp": optuna_sampler.gp}
        sampler = makers[name](space, seed, goals, prior)
    sampler.fresh = None if repeats else RandomSampler(space, seed)
    return sampler


def _loaded(name: str, source: Path | None) -> object:
    module, _, attribute = name.partition(":")
    if source is not None and str(source) not in sys.path:
        # Insert at the front, so that no installed package of the same name hides the module.
        sys.path.insert(0, str(source))
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # Catch every exception, because a user's module may raise anything.
        said = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        raise SweepError(f"sampler={name!r} can't be loaded: {said}. It must be in the sweep's source.") from error


def check_own(name: str, source: Path) -> None:
    """Raise an error if a user's sampler is certainly missing.

    The check reads the source of the sampler's module, but does not run it.

    Raises:
        SweepError: The module or the name in it does not exist.
    """
    module, _, attribute = name.partition(":")
    place = source / module.replace(".", "/")
    file = next((path for path in (place.with_name(f"{place.name}.py"), place / "__init__.py") if path.is_file()), None)
    if file is None:
        # If the source has no such file, the module may be installed in this interpreter, which also runs the controller.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise SweepError(f"sampler={name!r}: no module {module!r} in {str(source)!r}, and none is installed.")
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise SweepError(f"sampler={name!r}: {file.name} can't be read: {error}.") from None
    names = {_name_of(node) for node in ast.walk(tree)}
    if attribute not in names and not names & {"*", "__getattr__"}:
        raise SweepError(f"sampler={name!r}: {file.name} has no {attribute!r}.")


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.alias):
        return node.asname or node.name
    return getattr(node, "name", None) or getattr(node, "id", None)


class Proposals:
    """The points of a sweep's trials: the user's own first, then the sampler's.

    Args:
        source: Folder of a user's own sampler module.
        prior: Results of former sweeps.

    Raises:
        SweepError: The sampler is unknown, does not support the space, or cannot be loaded.
    """

    def __init__(self, spec: SweepSpec, source: Path, prior: Sequence[Trial] = ()) -> None:
        # Convert the user's points to raw values, so that samplers can learn from the results of these points.
        self._points = [spec.space.chosen(point) for point in spec.points]
        self._sampler = make_sampler(
            spec.sampler,
            spec.space,
            spec.seed,
            spec.goals,
            repeats=spec.repeats,
            source=source,
            prior=prior,
            tried=self._points,
        )

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """Return the point of trial `number`; None if the space has no further point."""
        if number < len(self._points):
            return Proposal(chosen=self._points[number])
        return self._sampler.propose(number, trials)
