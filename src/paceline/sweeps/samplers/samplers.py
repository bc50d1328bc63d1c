"""The samplers by name, and a user's own by where it lies."""

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
    """Refuse what can be known to be wrong of a sampler before a sweep starts.

    Raises:
        SweepError: no such sampler, one that does not know this space, or one that is not installed.
    """
    if not isinstance(name, str) or (name not in NAMES and ":" not in name):
        raise SweepError(
            f"sampler={name!r}: write one of {', '.join(NAMES)}, or 'module:function' of one of your own."
            f"{did_you_mean(str(name), NAMES)}"
        )
    # A user's own, with a colon in its name, is left to the controller: it lies in the source, which is not known here.
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
    """The sampler of this name. source: the folder in which the module of a user's own is looked for.

    prior: results of former sweeps, for samplers that learn. tried: the user's own points, which come before the sampler's.

    Raises:
        SweepError: as `check_sampler`; or the user's own can't be loaded.
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
        # In front: a module of the source's must not be hidden by an installed package of the same name.
        sys.path.insert(0, str(source))
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # Whatever the user's own module raises, it is the module that can't be loaded.
        said = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        raise SweepError(
            f"sampler={name!r} can't be loaded: {said}. It is looked for in the sweep's source."
        ) from error


def check_own(name: str, source: Path) -> None:
    """Refuse a user's own sampler that is certainly not there, by the text of its module, which is not run.

    Raises:
        SweepError: no such module, or no such name in it.
    """
    module, _, attribute = name.partition(":")
    place = source / module.replace(".", "/")
    file = next((path for path in (place.with_name(f"{place.name}.py"), place / "__init__.py") if path.is_file()), None)
    if file is None:
        # It may be installed where the sweep's controller runs: on this machine, with this interpreter.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise SweepError(
                f"sampler={name!r}: there is no module {module!r} in {str(source)!r}, and none is installed."
            )
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise SweepError(f"sampler={name!r}: {file.name} can't be read: {error}.") from None
    names = {_name_of(node) for node in ast.walk(tree)}
    if attribute not in names and not names & {"*", "__getattr__"}:
        raise SweepError(f"sampler={name!r}: {file.name} has no {attribute!r}.")


def _name_of(node: ast.AST) -> str | None:
    """The name that a piece of a module may give it."""
    if isinstance(node, ast.alias):
        return node.asname or node.name
    return getattr(node, "name", None) or getattr(node, "id", None)


class Proposals:
    """The user's own points first, then what the sampler proposes.

    source: the folder in which the module of a user's own sampler is looked for. prior: results of former sweeps.

    Raises:
        SweepError: as `samplers.make_sampler`.
    """

    def __init__(self, spec: SweepSpec, source: Path, prior: Sequence[Trial] = ()) -> None:
        # As raw values, so that samplers learn from them like from any other.
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
        """The point of trial `number`; None where there is nothing left to propose. trials: all those before it."""
        if number < len(self._points):
            return Proposal(chosen=self._points[number])
        return self._sampler.propose(number, trials)
