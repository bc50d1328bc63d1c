"""How much of a metric's variance each hyperparameter explains.

Hutter, Hoos and Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance, ICML 2014: fANOVA, by Optuna's
random forest, which needs scikit-learn.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sweeps.expressions import Raw, Uniform
from paceline.sweeps.samplers.optuna_sampler import distribution
from paceline.sweeps.space import Dimension, Space, every
from paceline.sweeps.trial import Trial

#: Fewer trials than this say nothing of a hyperparameter's importance; of more, the forest takes seconds and says the same.
LEAST = 10
_MOST = 300
#: Half of Optuna's, in half the time; the shares differ by less than one per cent.
_TREES = 32


@dataclass(frozen=True)
class Importance:
    """A hyperparameter's share of the metric's variance, from 0 to 1. trials: so many were looked at.

    is_conditional: not all trials have it, and the share is that among those that do.
    """

    name: str
    share: float
    trials: int
    is_conditional: bool = False


def missing() -> str | None:
    """What has to be installed for it, as a sentence; None where all is there."""
    lacking = [name for name, module in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if not lacking:
        return None
    return f"Importance is left out: it needs {' and '.join(lacking)}. pip install 'paceline[tune]'."


_NEEDS = {"Optuna": "optuna", "scikit-learn": "sklearn"}


def importances(trials: Sequence[tuple[Trial, float]], space: Space) -> tuple[Importance, ...]:
    """The share of each hyperparameter, the largest first; none of fewer than `LEAST` trials, or where all came to one value.

    trials: with what each came to; those that were stopped, with what they reached. A hyperparameter of a branch is judged among
        those that have it.
    """
    valued = [(trial, value) for trial, value in trials if trial.chosen]
    # Evenly over the sweep, for a sampler's later trials are others than its first.
    valued = valued[:: -(-len(valued) // _MOST)] if valued else []
    if len(valued) < LEAST or len({value for _, value in valued}) < 2:
        return ()
    dimensions = {d.key: d for d in every(space.dimensions) if d.expression.count != 1}
    plain = [dimension.name.lstrip("-") for dimension in dimensions.values()]
    everywhere = [key for key in dimensions if all(key in trial.chosen for trial, _ in valued)]
    shares = _shares(valued, [dimensions[key] for key in everywhere])
    found = [Importance(_name(dimensions[key], plain), shares[key], len(valued)) for key in everywhere]
    for key in dimensions.keys() - set(everywhere):
        with_it = [(trial, value) for trial, value in valued if key in trial.chosen]
        if len(with_it) >= LEAST and len({value for _, value in with_it}) > 1:
            common = [other for other in dimensions if all(other in trial.chosen for trial, _ in with_it)]
            share = _shares(with_it, [dimensions[other] for other in common])[key]
            found.append(Importance(_name(dimensions[key], plain), share, len(with_it), is_conditional=True))
    return tuple(sorted(found, key=lambda one: (-one.share, one.name)))


def _shares(valued: Sequence[tuple[Trial, float]], dimensions: Sequence[Dimension]) -> Mapping[str, float]:
    """Key -> share."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {dimension.key: _distribution(dimension) for dimension in dimensions}
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={d.key: _scaled(d, trial.chosen[d.key]) for d in dimensions},
                distributions=distributions,
                value=value,
            )
            for trial, value in valued
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, params=list(distributions))
    # A metric without variance gives no shares that are numbers.
    return {key: float(share) if math.isfinite(share) else 0.0 for key, share in found.items()}


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import FloatDistribution

    expression = dimension.expression
    if isinstance(expression, Uniform):
        return FloatDistribution(_scaled(dimension, expression.low), _scaled(dimension, expression.high))
    return distribution(expression)


def _scaled(dimension: Dimension, raw: Raw) -> Raw:
    # fANOVA takes each part of a range for as likely as any other of its length, and of these each logarithm is.
    expression = dimension.expression
    return math.log(raw) if isinstance(expression, Uniform) and expression.is_log else raw


def _name(dimension: Dimension, plain: Sequence[str]) -> str:
    """Its name; with the branch, where two branches have one of this name."""
    name = dimension.name.lstrip("-")
    return name if plain.count(name) == 1 else dimension.key.lstrip("-")
