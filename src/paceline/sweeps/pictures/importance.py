"""Compute how much of a metric's variance each hyperparameter explains (fANOVA).

Hutter, Hoos and Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance, ICML 2014. Optuna
implements fANOVA with a random forest, which needs scikit-learn.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.sweeps.expressions import Raw, Uniform
from paceline.sweeps.samplers.optuna_sampler import distribution
from paceline.sweeps.space import Dimension, Space, every
from paceline.sweeps.trial import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: Minimum number of trials: fewer trials give no reliable importance.
LEAST = 10
_MOST = 300  # maximum number of trials: more trials take seconds and hardly change the result
#: Number of trees: half of Optuna's default, which takes half the time. The shares differ by less than 1%.
_TREES = 32


@dataclass(frozen=True)
class Importance:
    """A hyperparameter's share of the metric's variance, from 0 to 1.

    Attributes:
        trials: Number of trials from which the share was computed.
        is_conditional: Whether some trials lack the hyperparameter. The share then comes from the trials that have it.
    """

    name: str
    share: float
    trials: int
    is_conditional: bool = False


def missing() -> str | None:
    """Return a sentence that names the missing packages, or None."""
    lacking = [name for name, module in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if not lacking:
        return None
    return f"Importance is left out: it needs {' and '.join(lacking)}. pip install 'paceline[tune]'."


_NEEDS = {"Optuna": "optuna", "scikit-learn": "sklearn"}


def importances(trials: Sequence[tuple[Trial, float]], space: Space) -> tuple[Importance, ...]:
    """Return each hyperparameter's share of the metric's variance, the largest first.

    The result is empty for fewer than 10 trials (`LEAST`), or if all values are equal. `trials` are pairs of a trial
    and its metric's value; a stopped trial has the value that it reached. If only one option of a choice has a
    hyperparameter, the share of this hyperparameter comes from the trials with this option.
    """
    valued = [(trial, value) for trial, value in trials if trial.chosen]
    # Take every n-th trial, because later trials of a sampler differ from the first trials.
    valued = valued[:: -(-len(valued) // _MOST)] if valued else []
    if len(valued) < LEAST or len({value for _, value in valued}) < 2:
        return ()
    dimensions = {d.key: d for d in every(space.dimensions) if d.expression.count != 1}
    plain = [dimension.name.lstrip("-") for dimension in dimensions.values()]
    everywhere = [key for key in dimensions if all(key in trial.chosen for trial, _ in valued)]
    shares = _shares(valued, [dimensions[key] for key in everywhere])
    shares_found = [Importance(_name(dimensions[key], plain), shares[key], len(valued)) for key in everywhere]
    for key in dimensions.keys() - set(everywhere):
        with_it = [(trial, value) for trial, value in valued if key in trial.chosen]
        if len(with_it) >= LEAST and len({value for _, value in with_it}) > 1:
            common = [other for other in dimensions if all(other in trial.chosen for trial, _ in with_it)]
            share = _shares(with_it, [dimensions[other] for other in common])[key]
            shares_found.append(Importance(_name(dimensions[key], plain), share, len(with_it), is_conditional=True))
    return tuple(sorted(shares_found, key=lambda one: (-one.share, one.name)))


def _shares(valued: Sequence[tuple[Trial, float]], dimensions: Sequence[Dimension]) -> Mapping[str, float]:
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
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator, params=list(distributions))
    # Replace NaN by 0: the shares are NaN if the metric is equal in all trials.
    return {key: float(share) if math.isfinite(share) else 0.0 for key, share in shares.items()}


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import FloatDistribution

    expression = dimension.expression
    if isinstance(expression, Uniform):
        return FloatDistribution(_scaled(dimension, expression.low), _scaled(dimension, expression.high))
    known: BaseDistribution = distribution(expression)
    return known


def _scaled(dimension: Dimension, raw: Raw) -> Raw:
    # fANOVA gives equally long intervals equal weight, so pass the logarithm of a parameter with a logarithmic range.
    expression = dimension.expression
    return math.log(raw) if isinstance(expression, Uniform) and expression.is_log else raw


def _name(dimension: Dimension, plain: Sequence[str]) -> str:
    name = dimension.name.lstrip("-")
    return name if plain.count(name) == 1 else dimension.key.lstrip("-")
