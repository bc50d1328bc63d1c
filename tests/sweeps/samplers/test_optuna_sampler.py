"""Tests of Optuna's samplers: a sampler that is rebuilt from stored trials proposes the same points as the original."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.samplers.sampler import RandomSampler
from paceline.sweeps.samplers.samplers import check_own, make_sampler
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

pytest.importorskip("optuna", reason="the extra tune is not installed")

MIXED = Space(
    {
        "lr": pl.loguniform(1e-4, 1e-1),
        "width": pl.qnormal(64, 16, 8),
        "layers": pl.randint(1, 5),
        "optimizer": pl.choice({"momentum": pl.uniform(0, 1)}, {"beta": pl.quniform(0.8, 1, 0.01)}),
        "seed": 3,
    }
)
BRANIN = Space({"x": pl.uniform(-5, 10), "y": pl.uniform(0, 15)})


def loss(values: dict[str, Any]) -> float:
    return float(abs(math.log10(values["lr"]) + 2) + abs(values["layers"] - 3) + values.get("optimizer.momentum", 0.5))


def branin(values: dict[str, Any]) -> float:
    x, y = values["x"], values["y"]
    a = y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6
    return float(a * a + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 - 0.397887)


def swept(
    sampler: Any, space: Space, objective: Any, count: int, known: list[Trial], in_flight: int = 4, goals: int = 1
) -> list[Trial]:
    """Return `count` trials that the sampler proposed. The last `in_flight - 1` of them still run."""
    trials = list(known)
    while len(trials) < count:
        proposal = sampler.propose(len(trials), trials)
        assert proposal is not None
        chosen = proposal.chosen
        trials.append(
            Trial(
                number=len(trials),
                run_id="",
                chosen=dict(chosen),
                values=space.values(chosen),
                status=states.RUNNING,
                # Convert the sampler's notes to JSON and back, because a trial's record stores them as JSON.
                notes=json.loads(json.dumps(dict(proposal.notes))),
            )
        )
        if (done := len(trials) - in_flight) >= 0:
            over = trials[done]
            trials[done] = Trial(
                number=done,
                run_id="",
                chosen=over.chosen,
                values=over.values,
                status=states.FAILED if done % 7 == 6 else states.COMPLETED,
                curve=(objective(over.values),),
                further=((over.values["x"],),) if goals > 1 else (),
                notes=over.notes,
            )
    return trials


def as_they_were(trials: list[Trial], count: int, in_flight: int = 4) -> list[Trial]:
    """Return the first `count` trials as `swept` had them at that time, when the last of them still ran."""
    first_that_runs = max(0, count - in_flight + 1)
    running = [
        dataclasses.replace(trial, status=states.RUNNING, curve=(), further=())
        for trial in trials[first_that_runs:count]
    ]
    return [*trials[:first_that_runs], *running]


@pytest.mark.promise("study-made-anew-proposes-unbroken")
def test_recreated_study_proposes_the_same_trials() -> None:
    unbroken = swept(make_sampler("tpe", MIXED, 5, ("minimize",)), MIXED, loss, 30, [])
    for cut in (3, 17, 25):
        known = as_they_were(unbroken, cut)
        again = swept(make_sampler("tpe", MIXED, 5, ("minimize",)), MIXED, loss, 30, known)
        for trial, same in zip(again, unbroken, strict=True):
            # Optuna 4.6 with numpy 1.24 sums in another order, so the last bit of a number may differ.
            assert trial.chosen == pytest.approx(same.chosen, rel=1e-12)


CHOICES = Space(
    {
        "lr": pl.loguniform(1e-5, 1),
        "decay": pl.loguniform(1e-7, 1e-1),
        "dropout": pl.uniform(0, 0.9),
        "layers": pl.randint(1, 9),
        "optimizer": pl.choice("sgd", "adam", "rmsprop"),
        "batch": pl.choice(32, 64, 128),
    }
)


def penalized(values: dict[str, Any]) -> float:
    rates = 0.3 * (math.log10(values["lr"]) + 3) ** 2 + 0.1 * (math.log10(values["decay"]) + 4) ** 2
    size = 0.02 * (values["layers"] - 4) ** 2 + (values["dropout"] - 0.2) ** 2
    wrong = {"sgd": 0.5, "adam": 0.0, "rmsprop": 0.2}[values["optimizer"]]
    return float(rates + size + wrong + {32: 0.2, 64: 0.0, 128: 0.3}[values["batch"]])


@pytest.mark.promise("wrong-option-choice-kept-because")
def test_tpe_abandons_a_bad_option_that_the_first_good_trials_used() -> None:
    """With only its joint estimator, TPE kept a bad option, so its best loss was 0.2, the cost of this option."""
    found = []
    for seed in (0, 2, 4):
        trials = swept(make_sampler("tpe", CHOICES, seed, ("minimize",)), CHOICES, penalized, 100, [], in_flight=8)
        found.append(min(penalized(dict(trial.values)) for trial in trials))
    assert statistics.median(found) < 0.15


NSGA = "import optuna\ndef make(seed):\n    return optuna.samplers.NSGAIISampler(seed=seed, population_size=8)\n"


@pytest.mark.promise("sampler-notes-trials-such-covariance")
@pytest.mark.parametrize(("name", "goals"), [("cmaes", 1), ("own_nsga:make", 2), ("tpe", 2)])
def test_recreated_sampler_proposes_the_same_trials_from_attributes_stored_with_earlier_trials(
    name: str, goals: int, tmp_path: Any
) -> None:
    """CMA-ES stores its covariance with trials, and genetic algorithms store the trials' generations."""
    (tmp_path / "own_nsga.py").write_text(NSGA)

    def made() -> Any:
        return make_sampler(name, BRANIN, 5, ("minimize", "maximize")[:goals], source=tmp_path)

    unbroken = swept(made(), BRANIN, branin, 48, [], goals=goals)
    for cut in (2, 19, 40):
        known = as_they_were(unbroken, cut)
        again = swept(made(), BRANIN, branin, 48, known, goals=goals)
        assert [trial.chosen for trial in again] == [trial.chosen for trial in unbroken]
    if name != "tpe":
        # Without the notes that the sampler has stored for each trial, its proposals would be different.
        forgotten = [dataclasses.replace(trial, notes={}) for trial in known]
        again = swept(made(), BRANIN, branin, 48, forgotten, goals=goals)
        assert [trial.chosen for trial in again] != [trial.chosen for trial in unbroken]


def prior(objective: Any, count: int, goals: int = 1) -> list[Trial]:
    found = swept(make_sampler("random", BRANIN, 9, ("minimize",)), BRANIN, objective, count + 4, [], goals=goals)
    known = [trial for trial in found if trial.status == states.COMPLETED]
    return [dataclasses.replace(trial, number=number - len(known)) for number, trial in enumerate(known)]


@pytest.mark.promise("results-former-sweeps-known-start")
@pytest.mark.parametrize("name", ["tpe", "cmaes"])
def test_sampler_with_results_of_earlier_sweeps_finds_better_points(name: str) -> None:
    def regret(seed: int, known: list[Trial]) -> float:
        sampler = make_sampler(name, BRANIN, seed, ("minimize",), prior=known)
        return min(value for t in swept(sampler, BRANIN, branin, 16, []) if (value := t.best("minimize")) is not None)

    known, seeds = prior(branin, 80), range(5)
    assert statistics.median(regret(seed, known) for seed in seeds) < 0.75 * statistics.median(
        regret(seed, []) for seed in seeds
    )


def test_cmaes_reports_the_needed_number_of_prior_results() -> None:
    with pytest.raises(SweepError, match="needs 10 results or more, and there are 6"):
        make_sampler("cmaes", BRANIN, 1, ("minimize",), prior=prior(branin, 7)[:6])


def test_proposed_points_are_valid_in_the_space() -> None:
    for trial in swept(make_sampler("tpe", MIXED, 1, ("minimize",)), MIXED, loss, 25, []):
        assert MIXED.values(MIXED.chosen(trial.values)) == pytest.approx(trial.values)


@pytest.mark.parametrize("name", ["tpe", "cmaes", pytest.param("gp", marks=pytest.mark.proof), "own_random:make"])
def test_points_of_a_finite_space_are_proposed_once(name: str, tmp_path: Any) -> None:
    # Regression: of 10 trials in a space of four points, the sampler tpe used one point for 5 trials and another point
    # for 1 trial.
    (tmp_path / "own_random.py").write_text(
        "import optuna\ndef make(seed):\n    return optuna.samplers.RandomSampler(seed=seed)\n"
    )
    space = Space({"a": pl.randint(0, 4), "b": pl.quniform(0, 3, 1)})
    sampler = make_sampler(name, space, 1, ("minimize",), source=tmp_path)
    trials = swept(sampler, space, lambda values: values["a"] - values["b"], 16, [])
    assert len({str(trial.values) for trial in trials}) == 16
    assert sampler.propose(16, trials) is None
    # A new sampler that starts after nine trials continues with the remaining points.
    anew = swept(
        make_sampler(name, space, 1, ("minimize",), source=tmp_path), space, lambda values: 1.0, 16, trials[:9]
    )
    assert len({str(trial.values) for trial in anew}) == 16
    repeating = make_sampler(name, space, 1, ("minimize",), repeats=True, source=tmp_path)
    assert repeating.propose(16, trials) is not None


def test_tpe_beats_random_search() -> None:
    def regret(name: str, seed: int) -> float:
        sampler = make_sampler(name, BRANIN, seed, ("minimize",))
        trials = swept(sampler, BRANIN, branin, 60, [], in_flight=8)
        return min(value for trial in trials if (value := trial.best("minimize")) is not None)

    seeds = range(3)
    assert statistics.median(regret("tpe", seed) for seed in seeds) < 0.6 * statistics.median(
        regret("random", seed) for seed in seeds
    )


def test_cmaes_proposes_points_of_a_space_of_numbers() -> None:
    for trial in swept(make_sampler("cmaes", BRANIN, 1, ("minimize",)), BRANIN, branin, 12, []):
        assert -5 <= trial.values["x"] <= 10
    with pytest.raises(SweepError, match="knows no choice"):
        make_sampler("cmaes", MIXED, 1, ("minimize",))


def test_sampler_defined_by_the_user_is_imported_from_the_source_folder(tmp_path: Any) -> None:
    (tmp_path / "own_sampler_of_mine.py").write_text(
        "import optuna\ndef make(seed):\n    return optuna.samplers.NSGAIISampler(seed=seed)\n"
    )
    sampler = make_sampler("own_sampler_of_mine:make", BRANIN, 0, ("minimize",), source=tmp_path)
    assert sampler.propose(0, ()) is not None
    with pytest.raises(SweepError, match="can't be loaded"):
        make_sampler("own_sampler_of_mine:none", BRANIN, 0, ("minimize",), source=tmp_path)
    # `check_own` only reads the source text. So it can show that a sampler does not exist, but not that it exists.
    check_own("own_sampler_of_mine:make", tmp_path)
    check_own("optuna.samplers:TPESampler", tmp_path)
    for said, name in {
        "own_sampler_of_mine.py has no 'none'": "own_sampler_of_mine:none",
        "no module 'nowhere_to_be_found'": "nowhere_to_be_found:make",
    }.items():
        with pytest.raises(SweepError, match=said):
            check_own(name, tmp_path)
    (tmp_path / "odd_sampler_of_mine.py").write_text("from os import *\ndef three(seed):\n    return 3\n")
    check_own("odd_sampler_of_mine:getcwd", tmp_path)
    with pytest.raises(SweepError, match="made 3, which is not one of Optuna's samplers"):
        make_sampler("odd_sampler_of_mine:three", BRANIN, 0, ("minimize",), source=tmp_path).propose(0, ())
    (tmp_path / "broken_sampler_of_mine.py").write_text("1 / 0\n")
    with pytest.raises(SweepError, match="can't be loaded: ZeroDivisionError"):
        make_sampler("broken_sampler_of_mine:make", BRANIN, 0, ("minimize",), source=tmp_path)


def test_unknown_sampler_names_are_refused() -> None:
    from paceline.sweeps.samplers.samplers import check_sampler

    for name in ("bayes", 3, None):
        with pytest.raises(SweepError, match="write one of random, grid, tpe"):
            check_sampler(name, BRANIN)
    assert isinstance(make_sampler("random", BRANIN, 0, ("minimize",)), RandomSampler)


def test_existing_study_proposes_the_same_point_after_a_resumed_trial_as_a_new_study() -> None:
    """An Optuna study can't change a result that it has received. A resumed trial gets a second, different result."""
    space = Space({"x": pl.uniform(0, 1)})

    def of(number: int, curve: tuple[float, ...], status: str, legs: int = 1) -> Trial:
        trial = Trial(number=number, run_id="s", chosen={"x": number / 30}, status=status, curve=curve)
        return dataclasses.replace(trial, earlier=trial.legs * (legs - 1), begin=len(curve[: 2 * (legs - 1)]))

    lives_on = make_sampler("tpe", space, 1, ("maximize",))
    known = [of(number, (0.1 * number, 0.2), states.CANCELED) for number in range(20)]
    lives_on.propose(20, known)
    # Trial 3 has reached a higher value. Trial 4 runs again, and counts with the value that it had when it was paused.
    known[3] = of(3, (0.3, 0.2, 9.0), states.CANCELED, legs=2)
    known[4] = of(4, (0.4, 0.2, 7.0), states.RUNNING, legs=2)
    anew = make_sampler("tpe", space, 1, ("maximize",))
    assert lives_on.propose(21, known) == anew.propose(21, known)
    assert lives_on.propose(21, known) != make_sampler("tpe", space, 1, ("maximize",)).propose(
        21, known[:3] + known[5:]
    )
