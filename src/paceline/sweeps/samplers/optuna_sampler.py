"""Model-based samplers that use Optuna with an in-memory study.

A restarted controller rebuilds the study from the sweep's trials. Each trial gets a new Optuna sampler, with a seed
from the sweep's seed and the trial's number. So a rebuilt study leads to the same proposals.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.expressions import Choice, Expression, Fixed, Integers, Normal, Raw, Uniform
from paceline.sweeps.samplers.sampler import Proposal, RandomSampler, seed_of
from paceline.sweeps.space import Dimension, Space, every
from paceline.sweeps.trial import Goal, Trial

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

#: Keys of a trial's notes under which the sampler's attributes of this trial, and of the whole study, are stored.
_TRIAL, _STUDY = "trial", "study"
#: Number of random trials before Optuna fits its first model. This is Optuna's default.
_STARTUP_TRIALS = 10
#: From this number of trials on, model all parameters jointly: separate models are slow, and good choices are known by then.
_ALONE_TRIALS = 300
#: Minimum number of former results with which CMA-ES starts: it uses only the best tenth of them.
_WARM_START_TRIALS = 10
#: Maximum number of draws to get a point that no other trial has.
_DRAWS = 10


class OptunaSampler:
    """A sampler that proposes the points of an Optuna sampler.

    Args:
        make: Returns the Optuna sampler for a trial's seed and number.
        goals: The goal of each metric. With several metrics, the study is multi-objective.
        prior: Results of former sweeps, which are added to the study first.
        keeps_notes: Whether to store the sampler's state (Optuna's system attributes) with each proposal, for a rebuilt study.

    Raises:
        SweepError: Optuna is not installed.
    """

    def __init__(
        self,
        space: Space,
        seed: int,
        goals: Sequence[Goal],
        make: Callable[[int, int], optuna.samplers.BaseSampler],
        prior: Sequence[Trial] = (),
        *,
        keeps_notes: bool = True,
    ) -> None:
        #: A random sampler that proposes only points that no trial has used. None if points may repeat.
        self.fresh: RandomSampler | None = None
        self._space = space
        self._seed = seed
        self._goals = list(goals)
        self._make = make
        self._prior = prior
        self._keeps_notes = keeps_notes
        self._begin()

    def _begin(self) -> None:
        self._study = _optuna().create_study(directions=self._goals, sampler=self._made(self._seed, 0))
        for trial in self._prior:
            self._study.add_trial(frozen(self._space, trial, self._known(trial)))
        #: The attributes that the sampler has stored in the study so far.
        self._seen: dict[str, Any] = {}
        #: Trial number -> the trial's number in Optuna's study.
        self._asked: dict[int, int] = {}
        self._told: dict[int, tuple[Trial, tuple[float, ...] | None]] = {}  # trial number -> state known to Optuna

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """Return a new point, or None if every point was tried."""
        # If the result of a known trial has changed, as after a pause, rebuild the study, which can't replace results.
        if any(self._has_changed(trial) for trial in trials):
            self._begin()
        for trial in trials:
            self._tell(trial)
        for draw in range(_DRAWS):
            self._study.sampler = self._made((seed_of(self._seed, number) + draw) % 2**32, number)
            suggestion = self._study.ask()
            chosen = self._space.draw(functools.partial(_suggest, suggestion))
            if self.fresh is None or not self.fresh.knows(chosen, trials):
                self._asked[number] = suggestion.number
                return Proposal(chosen=chosen, notes=self._notes(suggestion.number) if self._keeps_notes else {})
            # Discard the suggestion: Optuna's samplers ignore failed trials.
            self._study.tell(suggestion.number, state=_optuna().trial.TrialState.FAIL)
        # All suggestions repeat known points, so use a random point. Later, `_tell` adds this point to the study.
        return self.fresh.propose(number, trials) if self.fresh is not None else None

    def _has_changed(self, trial: Trial) -> bool:
        known = self._told.get(trial.number)
        # Compare identity first: unchanged trials are the same objects, and comparing curves takes milliseconds.
        return known is not None and known[0] is not trial and known[1] != self._known(trial)

    def _notes(self, number: int) -> dict[str, Any]:
        of_trial = self._study.get_trials(deepcopy=False)[number].system_attrs
        of_study = self._study._storage.get_study_system_attrs(self._study._study_id)
        new = {name: value for name, value in of_study.items() if self._seen.get(name) != value}
        self._seen = dict(of_study)
        parts = {_TRIAL: _json_alone(of_trial), _STUDY: _json_alone(new)}
        return {name: part for name, part in parts.items() if part}

    def _made(self, seed: int, number: int) -> optuna.samplers.BaseSampler:
        with warnings.catch_warnings():
            # Hide the warning about `multivariate` and `group`, which only some versions of Optuna call experimental.
            warnings.simplefilter("ignore", _optuna().exceptions.ExperimentalWarning)
            return self._make(seed, number)

    def _tell(self, trial: Trial) -> None:
        """Add a trial to the study, as running if it has no result."""
        optuna = _optuna()
        if trial.number in self._told:
            return
        # Add a trial without a result as running: TPE's constant liar then avoids its point.
        is_known = trial.is_over or bool(trial.earlier)
        values = self._known(trial) if is_known else None
        if is_known:
            self._told[trial.number] = trial, values
        if trial.number not in self._asked:
            # This study did not suggest the point: a user or an earlier process did. So add the trial to the study.
            self._asked[trial.number] = len(self._study.get_trials(deepcopy=False))
            self._study.add_trial(frozen(self._space, trial, values, is_running=not is_known))
            for name, value in trial.notes.get(_STUDY, {}).items():
                self._study._storage.set_study_system_attr(self._study._study_id, name, value)
                self._seen[name] = value
        elif is_known and values is None:
            self._study.tell(self._asked[trial.number], state=optuna.trial.TrialState.FAIL)
        elif is_known:
            self._study.tell(self._asked[trial.number], values)

    def _known(self, trial: Trial) -> tuple[float, ...] | None:
        """Return a trial's finite values so far, one per metric; None if failed or incomplete."""
        if trial.status == states.FAILED:
            return None
        if len(self._goals) > 1:
            return trial.last
        goal = self._goals[0]
        value = trial.best(goal) if trial.is_over else trial.best(goal, trial.begin)
        return None if value is None else (value,)


def frozen(space: Space, trial: Trial, values: Sequence[float] | None, *, is_running: bool = False) -> FrozenTrial:
    """Return a trial in Optuna's form, as failed if `values` is None."""
    optuna = _optuna()
    ended = optuna.trial.TrialState.FAIL if values is None else optuna.trial.TrialState.COMPLETE
    distributions: dict[str, object] = {}

    def note(dimension: Dimension) -> Raw:
        if not isinstance(dimension.expression, Fixed):
            distributions[dimension.key] = distribution(dimension.expression)
        return trial.chosen[dimension.key]

    space.draw(note)
    made: FrozenTrial = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING if is_running else ended,
        values=None if is_running or values is None else list(values),
        params={key: trial.chosen[key] for key in distributions},
        distributions=distributions,
        system_attrs=dict(trial.notes.get(_TRIAL, {})),
    )
    return made


def tpe(space: Space, seed: int, goals: Sequence[Goal], prior: Sequence[Trial] = ()) -> OptunaSampler:
    """Return a sampler by tree-structured Parzen estimators (Bergstra et al., NeurIPS 2011).

    The sampler avoids points of running trials. It estimates all parameters jointly. But the joint estimator hardly
    ever tries another option of a choice than the best trials have. So if the space has a choice, a random half of the
    first 300 trials use a separate estimator for each parameter.
    """
    optuna = _optuna()
    dimensions = list(every(space.dimensions))
    has_choice = any(isinstance(dimension.expression, Choice) for dimension in dimensions)
    has_branches = any(dimension.branches for dimension in dimensions)

    known = {d.key: distribution(d.expression) for d in dimensions if not isinstance(d.expression, Fixed)}

    class Joint(optuna.samplers.TPESampler):  # type: ignore[misc, name-defined]
        """A TPE sampler that models all parameters jointly."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, object]:
            return {key: known[key] for key in sorted(known) if not known[key].single()}

    def make(seed: int, number: int) -> Any:
        is_joint = not has_choice or seed % 2 == 0 or number >= _ALONE_TRIALS
        # A joint model needs the same parameters in all trials, but each trial has only those of its chosen branches.
        kind = Joint if is_joint and not has_branches else optuna.samplers.TPESampler
        return kind(
            seed=seed,
            multivariate=is_joint,
            group=is_joint and has_branches,
            constant_liar=True,
            n_startup_trials=_STARTUP_TRIALS,
        )

    # Keep no notes on the trials: the attributes that Optuna's sampler would store in them only repeat the point.
    return OptunaSampler(space, seed, goals, make, prior, keeps_notes=False)


def cmaes(space: Space, seed: int, goals: Sequence[Goal], prior: Sequence[Trial] = ()) -> OptunaSampler:
    """Make a CMA-ES sampler (Hansen, 2016), for spaces of numbers alone.

    Raises:
        SweepError: The space has a choice, there are several metrics, or `cmaes` or enough `prior` results are missing.
    """
    # Check only the top level: a branch always belongs to a choice, and a choice at the top level is refused.
    for dimension in space.dimensions:
        if isinstance(dimension.expression, Choice):
            raise SweepError(f"{dimension.name}: the sampler cmaes knows no choice(). Take tpe, or a range of numbers.")
    if len(goals) > 1:
        raise SweepError("the sampler cmaes knows one metric. Take tpe for several.")
    optuna = _optuna()
    if importlib.util.find_spec("cmaes") is None:
        raise SweepError("the sampler cmaes needs the package cmaes: pip install 'paceline[tune]'.")
    if not prior:
        return OptunaSampler(space, seed, goals, lambda seed, _: optuna.samplers.CmaEsSampler(seed=seed))
    known = [(trial, value) for trial in prior if (value := trial.best(goals[0])) is not None]
    if len(known) < _WARM_START_TRIALS:
        raise SweepError(
            f"warm_start with the sampler cmaes needs {_WARM_START_TRIALS} results or more, and there are {len(known)}. Take tpe."
        )
    # CMA-ES uses other sweeps' results only for its first covariance (Nomura et al., AAAI 2021): pass them as `source_trials`.
    source = [frozen(space, trial, (value,)) for trial, value in known]
    return OptunaSampler(
        space, seed, goals, lambda seed, _: optuna.samplers.CmaEsSampler(seed=seed, source_trials=source)
    )


def gp(space: Space, seed: int, goals: Sequence[Goal], prior: Sequence[Trial] = ()) -> OptunaSampler:
    """Make a sampler by a Gaussian process and expected improvement.

    The sampler needs torch and scipy, and takes seconds to propose a point.

    Raises:
        SweepError: torch or scipy is not installed.
    """
    optuna = _optuna()
    for module in ("torch", "scipy"):
        if importlib.util.find_spec(module) is None:
            raise SweepError(f"the sampler gp needs {module}, which is not installed here: pip install {module}.")
    return OptunaSampler(space, seed, goals, lambda seed, _: optuna.samplers.GPSampler(seed=seed), prior)


def own(sampler: Any, space: Space, seed: int, goals: Sequence[Goal], prior: Sequence[Trial] = ()) -> OptunaSampler:
    """Return a sampler that a user's class or function makes.

    Raises:
        SweepError: The object is neither an Optuna sampler class nor a function that makes a sampler.
    """
    if not callable(sampler):
        raise SweepError(
            f"the sampler {sampler!r} is neither a name nor a function of a seed. Give random, grid, tpe, cmaes, gp, or such as "
            "lambda seed: optuna.samplers.NSGAIISampler(seed=seed)."
        )
    is_class = inspect.isclass(sampler)

    def make(seed: int, _: int) -> Any:
        # Pass the seed by name, since Optuna's classes have other arguments before it.
        made = sampler(seed=seed) if is_class else sampler(seed)
        if not isinstance(made, _optuna().samplers.BaseSampler):
            raise SweepError(f"the sampler function {sampler!r} made {made!r}, which is not one of Optuna's samplers.")
        return made

    return OptunaSampler(space, seed, goals, make, prior)


def _suggest(trial: OptunaTrial, dimension: Dimension) -> Raw:
    expression, key = dimension.expression, dimension.key
    if isinstance(expression, Fixed):
        return 0
    if isinstance(expression, Choice):
        # Pass indexes, since Optuna warns about categories that are lists or mappings.
        return int(trial.suggest_categorical(key, list(range(expression.count))))
    if isinstance(expression, Integers):
        # Subtract 1, because Optuna's upper bound is inclusive.
        return trial.suggest_int(key, expression.low, expression.high - 1)
    assert isinstance(expression, (Uniform, Normal))
    is_log = isinstance(expression, Uniform) and expression.is_log
    return trial.suggest_float(key, expression.low, expression.high, log=is_log)


def distribution(expression: Expression) -> Any:
    """Return Optuna's distribution for the raw values of an expression."""
    distributions = _optuna().distributions
    if isinstance(expression, Choice):
        return distributions.CategoricalDistribution(list(range(expression.count)))
    if isinstance(expression, Integers):
        return distributions.IntDistribution(expression.low, expression.high - 1)
    assert isinstance(expression, (Uniform, Normal))
    is_log = isinstance(expression, Uniform) and expression.is_log
    return distributions.FloatDistribution(expression.low, expression.high, log=is_log)


def _json_alone(values: Mapping[str, object]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError):
            plain[name] = json.loads(json.dumps(value))
    return plain


@functools.cache
def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SweepError(
            "this sampler needs Optuna, which is not installed here: pip install 'paceline[tune]'. random and grid need nothing."
        ) from None
    # Keep Optuna from logging each trial to standard error, which is the controller's log.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
