"""How near a sweep with TPE comes to the optimum: against random points, and against Optuna run by hand with the same seeds.

Four functions, each with 100 trials of which 8 are in flight, 11 seeds. The figures depend on no clock.
Branin and Hartmann 6: https://www.sfu.ca/~ssurjano/optimization.html.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import optuna

import paceline as pl
from common import median, report
from paceline.sweeps.samplers.sampler import seed_of
from paceline.sweeps.samplers.samplers import make_sampler
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

TRIALS = 100
IN_FLIGHT = 8
SEEDS = 11
#: With the seeds from 0 on the sampler was chosen, so they would flatter it.
FIRST_SEED = 1000
MOST_OF_RANDOM = 0.35

_A = ((10, 3, 17, 3.5, 1.7, 8), (0.05, 10, 17, 0.1, 8, 14), (3, 3.5, 1.7, 10, 17, 8), (17, 8, 0.05, 10, 0.1, 14))
_P = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)


def branin(x: Mapping[str, Any]) -> float:
    a, b = x["a"], x["b"]
    part = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return part**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(a) + 10 - 0.39788735772973816


def hartmann6(x: Mapping[str, Any]) -> float:
    point = [x[name] for name in "abcdef"]
    total = 0.0
    for weight, scales, centre in zip((1.0, 1.2, 3.0, 3.2), _A, _P, strict=True):
        total += weight * math.exp(-sum(s * (v - c) ** 2 for s, v, c in zip(scales, point, centre, strict=True)))
    return 3.3223680114155156 - total


def rosenbrock5(x: Mapping[str, Any]) -> float:
    point = [x[name] for name in "abcde"]
    return sum(100 * (v - u**2) ** 2 + (1 - u) ** 2 for u, v in itertools.pairwise(point))


def mixed(x: Mapping[str, Any]) -> float:
    """The loss of a made-up training: the best learning rate depends on the optimizer."""
    centre = {"sgd": -1.0, "adam": -3.0, "rmsprop": -2.5}[x["optimizer"]]
    base = {"sgd": 0.1, "adam": 0.0, "rmsprop": 0.2}[x["optimizer"]]
    rate = 0.5 * (math.log10(x["lr"]) - centre) ** 2
    decay = 0.1 * (math.log10(x["decay"]) + 4) ** 2
    size = 0.05 * abs(x["layers"] - 4) + {32: 0.05, 64: 0.0, 128: 0.1}[x["batch"]]
    return base + rate + decay + size + 0.5 * (x["dropout"] - 0.2) ** 2


PROBLEMS: dict[str, tuple[Callable[[Mapping[str, Any]], float], dict[str, Any]]] = {
    "branin": (branin, {"a": pl.uniform(-5, 10), "b": pl.uniform(0, 15)}),
    "hartmann6": (hartmann6, {name: pl.uniform(0, 1) for name in "abcdef"}),
    "rosenbrock5": (rosenbrock5, {name: pl.uniform(-2, 2) for name in "abcde"}),
    "mixed": (
        mixed,
        {
            "lr": pl.loguniform(1e-5, 1),
            "decay": pl.loguniform(1e-7, 1e-1),
            "dropout": pl.uniform(0, 0.9),
            "layers": pl.randint(1, 9),
            "optimizer": pl.choice("sgd", "adam", "rmsprop"),
            "batch": pl.choice(32, 64, 128),
        },
    ),
}


def ours(problem: str, sampler: str, seed: int) -> float:
    """The least loss that a sweep's sampler finds."""
    function, parts = PROBLEMS[problem]
    space = Space(parts)
    proposer = make_sampler(sampler, space, seed, ("minimize",))
    trials: list[Trial] = []
    ends = Ends(seed)
    for number in range(TRIALS):
        ended = ends.before(number)
        if ended is not None:
            trial = trials[ended]
            loss = function(trial.values)
            trials[ended] = Trial(
                number=ended,
                run_id="",
                chosen=trial.chosen,
                values=trial.values,
                status="Completed",
                curve=(loss,),
            )
        proposal = proposer.propose(number, trials)
        assert proposal is not None
        chosen = proposal.chosen
        trials.append(Trial(number=number, run_id="", chosen=chosen, values=space.values(chosen), status="Running"))
    return min(function(trial.values) for trial in trials)


def by_hand(problem: str, seed: int) -> float:
    """The same with Optuna's own study, as its documentation has it: one sampler for all trials."""
    function, parts = PROBLEMS[problem]
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    asked: list[optuna.Trial] = []
    losses: list[float] = []
    ends = Ends(seed)
    for number in range(TRIALS):
        ended = ends.before(number)
        if ended is not None:
            study.tell(asked[ended], losses[ended])
        trial = study.ask()
        asked.append(trial)
        losses.append(function({name: suggested(trial, name, part) for name, part in parts.items()}))
    return min(losses)


def suggested(trial: optuna.Trial, name: str, part: Any) -> Any:
    kind, arguments = part.to_json()
    if kind == "choice":
        return trial.suggest_categorical(name, arguments[0])
    if kind == "randint":
        return trial.suggest_int(name, arguments[0], arguments[1] - 1)
    return trial.suggest_float(name, arguments[0], arguments[1], log=kind == "loguniform")


class Ends:
    """Which trial has ended when the next one begins: of those in flight one by chance, the same for both sides."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(f"ends {seed}")
        self._live: list[int] = []

    def before(self, number: int) -> int | None:
        ended = self._live.pop(self._source.randrange(IN_FLIGHT)) if len(self._live) == IN_FLIGHT else None
        self._live.append(number)
        return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="PROBLEM")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    assert seed_of(0, 0) != seed_of(0, 1), "each trial has a seed of its own"
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    for problem in given.problems:
        tpe = median([ours(problem, "tpe", seed) for seed in seeds])
        chance = median([ours(problem, "random", seed) for seed in seeds])
        hand = median([by_hand(problem, seed) for seed in seeds])
        report(
            f"sweep_regret_{problem}",
            f"regret of TPE on {problem} after {TRIALS} trials, {IN_FLIGHT} in flight, median of {given.seeds} seeds",
            f"at most {MOST_OF_RANDOM} times random's, and not above that of Optuna by hand",
            tpe <= MOST_OF_RANDOM * chance and tpe <= hand,
            regret=tpe,
            random=chance,
            of_random=tpe / chance,
            optuna=hand,
            of_optuna=tpe / hand,
        )


if __name__ == "__main__":
    sys.exit(main())
