"""Model-based sampling by Optuna, asked and told in memory.

The study is no storage: it is made anew from the sweep's trials wherever a sweep goes on. A sampler that has been asked
before proposes what one that is made anew with the same seed does not, so each trial gets a sampler of its own, seeded
by the sweep's seed and the trial's number.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.expressions import Choice, Fixed, Integers, Normal, Raw, Uniform
from paceline.sweeps.samplers.sampler import seed_of
from paceline.sweeps.space import Dimension, Space
from paceline.sweeps.trial import Goal, Trial

if TYPE_CHECKING:
    import optuna
    from optuna.trial import Trial as OptunaTrial

#: Trials that are drawn at random before a model is made; Optuna's own number.
_STARTUP_TRIALS = 10


class OptunaSampler:
    """Proposes what one of Optuna's samplers does.

    make: seed -> the sampler. goals: one for each metric; several make the study one of several objectives, whose values a
        trial's `objectives` are.

    Raises:
        SweepError: Optuna is not installed.
    """

    def __init__(
        self, space: Space, seed: int, goals: Sequence[Goal], make: Callable[[int], optuna.samplers.BaseSampler]
    ) -> None:
        optuna = _optuna()
        self._space = space
        self._seed = seed
        self._goal = goals[0]
        self._goals = list(goals)
        self._make = make
        self._study = optuna.create_study(directions=list(goals), sampler=self._made(seed))
        #: Number of a trial of ours -> the study's; and what the study was told of those that it knows the end of.
        self._asked: dict[int, OptunaTrial] = {}
        self._told: dict[int, float | None] = {}

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, Raw] | None:
        """Key -> raw value."""
        # A trial that was paused has gone on and comes to more. A study can't be told twice, so it is made anew.
        if any(trial.number in self._told and self._told[trial.number] != self._known(trial) for trial in trials):
            self._study = _optuna().create_study(directions=self._goals, sampler=self._made(self._seed))
            self._asked, self._told = {}, {}
        for trial in trials:
            self._tell(trial)
        self._study.sampler = self._made(seed_of(self._seed, number))
        asked = self._asked[number] = self._study.ask()
        return self._space.draw(functools.partial(_suggest, asked))

    def _made(self, seed: int) -> optuna.samplers.BaseSampler:
        with warnings.catch_warnings():
            # `multivariate` and `group` are called experimental in some versions, and are the default in others.
            warnings.simplefilter("ignore", _optuna().exceptions.ExperimentalWarning)
            return self._make(seed)

    def _tell(self, trial: Trial) -> None:
        """Let the study know of a trial: as running, so that it repels others, and once as ended."""
        optuna = _optuna()
        if trial.number in self._told:
            return
        if trial.number not in self._asked:
            # A trial of before this process: the study is given the point, in the way in which it would have asked for it.
            self._study.enqueue_trial(dict(trial.chosen))
            known = self._asked[trial.number] = self._study.ask()
            self._space.draw(functools.partial(_suggest, known))
        # Optuna knows it as running from here on; TPE's constant liar then proposes points away from it.
        if not trial.is_over and not trial.earlier:
            return
        value = self._told[trial.number] = self._known(trial)
        if value is None:
            self._study.tell(self._asked[trial.number], state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._asked[trial.number], value)

    def _known(self, trial: Trial) -> float | None:
        """What a trial came to, of one that goes on what it had come to before; None where it failed or has no finite value.

        A trial that a policy stopped is canceled, and tells what it reached; what a failed one logged is not trusted.
        """
        if trial.status == states.FAILED:
            return None
        return trial.best(self._goal) if trial.is_over else trial.best(self._goal, trial.begin)


def tpe(space: Space, seed: int, goals: Sequence[Goal]) -> OptunaSampler:
    """Tree-structured Parzen estimators (Bergstra et al., NeurIPS 2011), over all parameters together; running trials repel."""
    optuna = _optuna()

    def make(seed: int) -> Any:
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=_STARTUP_TRIALS
        )

    return OptunaSampler(space, seed, goals, make)


def cmaes(space: Space, seed: int, goals: Sequence[Goal]) -> OptunaSampler:
    """Covariance matrix adaptation (Hansen, 2016), for spaces of numbers alone.

    Raises:
        SweepError: a choice, several metrics, or no `cmaes`.
    """
    # A choice inside of a branch needs no look: its branch hangs on a choice that is refused here.
    for dimension in space.dimensions:
        if isinstance(dimension.expression, Choice):
            raise SweepError(f"{dimension.name}: the sampler cmaes knows no choice(). Take tpe, or a range of numbers.")
    if len(goals) > 1:
        raise SweepError("the sampler cmaes knows one metric. Take tpe for several.")
    optuna = _optuna()
    if importlib.util.find_spec("cmaes") is None:
        raise SweepError("the sampler cmaes needs the package cmaes: pip install 'paceline[tune]'.")
    return OptunaSampler(space, seed, goals, lambda seed: optuna.samplers.CmaEsSampler(seed=seed))


def gp(space: Space, seed: int, goals: Sequence[Goal]) -> OptunaSampler:
    """A Gaussian process with expected improvement; needs torch and scipy, and takes seconds for each trial.

    Raises:
        SweepError: torch or scipy is not installed.
    """
    optuna = _optuna()
    for module in ("torch", "scipy"):
        if importlib.util.find_spec(module) is None:
            raise SweepError(f"the sampler gp needs {module}, which is not installed here: pip install {module}.")
    return OptunaSampler(space, seed, goals, lambda seed: optuna.samplers.GPSampler(seed=seed))


def own(sampler: Any, space: Space, seed: int, goals: Sequence[Goal]) -> OptunaSampler:
    """A sampler of Optuna's, or a subclass of its base, as the user made it: a class, or a function seed -> sampler.

    Raises:
        SweepError: it is neither.
    """
    if not callable(sampler):
        raise SweepError(
            f"the sampler {sampler!r} is neither a name nor a function of a seed. Give random, grid, tpe, cmaes, gp, or such as "
            "lambda seed: optuna.samplers.NSGAIISampler(seed=seed)."
        )
    make = sampler
    if inspect.isclass(sampler):
        # Optuna's classes take the seed by name, and some have other arguments before it.
        make = functools.partial(_seeded, sampler)
    return OptunaSampler(space, seed, goals, make)


def _seeded(sampler: type, seed: int) -> Any:
    return sampler(seed=seed)


def _suggest(trial: OptunaTrial, dimension: Dimension) -> Raw:
    expression, key = dimension.expression, dimension.key
    if isinstance(expression, Fixed):
        return 0
    if isinstance(expression, Choice):
        # By index: Optuna keeps categories that are lists or mappings only with a warning.
        return int(trial.suggest_categorical(key, list(range(expression.count))))
    if isinstance(expression, Integers):
        # Optuna's upper bound is included, ours is not.
        return trial.suggest_int(key, expression.low, expression.high - 1)
    assert isinstance(expression, (Uniform, Normal))
    is_log = isinstance(expression, Uniform) and expression.is_log
    return trial.suggest_float(key, expression.low, expression.high, log=is_log)


@functools.cache
def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SweepError(
            "this sampler needs Optuna, which is not installed here: pip install 'paceline[tune]'. random and grid need nothing."
        ) from None
    # Optuna would write a line for each trial to standard error, which is the controller's log.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
