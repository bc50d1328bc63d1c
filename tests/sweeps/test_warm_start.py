"""Results of former sweeps as prior knowledge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.runs import removal, states
from paceline.runs.folder import RunFolder
from paceline.sweeps import trial_runs
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.warm_start import KnownResult, as_trials, keep, known_results, prior_trials
from tests.sweeps.made import SWEEP_ID, add_trial, log_values, make_sweep

FORMER = {"--lr": pl.uniform(0, 1), "batch": pl.choice(16, 32), "depth": 3}


def former(tmp_path: Path, **values: Any) -> RunFolder:
    """A sweep that has ended, with trials of all kinds."""
    folder = make_sweep(tmp_path / "runs", SweepSpec(space=Space(FORMER), metric="loss", **values))
    for number, (lr, curve, status) in enumerate(
        [
            (0.1, (3.0, 2.0, 2.5), states.COMPLETED),
            (0.2, (9.0,), states.CANCELED),
            (0.3, (1.0,), states.FAILED),
            (0.4, (math.nan,), states.COMPLETED),
            (0.9, (4.0,), states.COMPLETED),
        ]
    ):
        given = {"--lr": lr, "batch": 32, "depth": 3}
        add_trial(folder, number, given, curve, status, chosen={"--lr": lr, "batch": 1, "depth": 0})
    return folder


def results(tmp_path: Path, space: dict[str, Any], **values: Any) -> list[KnownResult]:
    spec = SweepSpec(
        space=Space(space),
        **{"metric": "loss", "goal": "minimize", "sampler": "tpe", "warm_start": (SWEEP_ID,), **values},
    )
    return known_results(spec, tmp_path / "runs")


def test_warm_start_converts_former_results_into_the_new_space(tmp_path: Path) -> None:
    former(tmp_path)
    # The new space has the options in another order, other bounds, names without dashes, and one constant less.
    found = results(tmp_path, {"lr": pl.uniform(0, 0.5), "batch": pl.choice(64, 32, 16), "new": 1})
    # Trial 2 failed, trial 3 has no finite value, and trial 4 lies outside of the new space.
    assert [(one["run_id"][-2:], one["values"]) for one in found] == [("_0", [2.0]), ("_1", [9.0])]
    assert found[0]["chosen"] == {"lr": 0.1, "batch": 1, "new": 0}
    trials = as_trials(found)
    assert [(trial.number, trial.best("minimize")) for trial in trials] == [(-2, 2.0), (-1, 9.0)]
    # The goal of the new sweep decides which value is the best.
    assert results(tmp_path, FORMER, goal="maximize")[0]["values"] == [3.0]


def test_warm_start_results_are_stored_with_the_sweep_and_survive_removal_of_the_earlier_one(tmp_path: Path) -> None:
    folder = former(tmp_path)
    spec = SweepSpec(space=Space(FORMER), metric="loss", sampler="tpe", warm_start=(SWEEP_ID,))
    new = RunFolder(tmp_path / "runs" / "new_1700000000_00000002")
    new.path.mkdir()
    # A submission that was killed may not have stored the results, so the controller stores them.
    assert len(prior_trials(new, spec)) == 3
    removal.remove(folder)
    assert len(prior_trials(new, spec)) == 3
    with pytest.raises(SweepError, match="there is no run"):
        known_results(spec, tmp_path / "runs")
    keep(new, [])


def test_warm_start_needs_all_metrics_of_the_new_sweep(tmp_path: Path) -> None:
    folder = former(tmp_path)
    with pytest.raises(SweepError, match=r"no trial .* of loss and size. Its trials have logged loss"):
        results(tmp_path, FORMER, further=(("size", "minimize"),))
    # The cache of the earlier sweep has only its own metric.
    for trial in trial_runs.trials(folder, SweepSpec(space=Space(FORMER), metric="loss")):
        trial_runs.keep(folder, trial)
    log_values(RunFolder(folder.path.with_name(f"{SWEEP_ID}_0")), "size", (7.0,))
    (found,) = results(tmp_path, FORMER, further=(("size", "minimize"),))
    assert found["values"] == [2.5, 7.0]


@pytest.mark.promise("results-former-sweeps-known-start")
def test_incompatible_spaces_raise_an_error_that_names_the_hyperparameter(tmp_path: Path) -> None:
    former(tmp_path)
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {"lr": pl.uniform(0, 1)},
            {},
            f"the space of sweep {SWEEP_ID} does not fit: it varied batch, which this one does not.",
        ),
        ({**FORMER, "beta": pl.uniform(0, 1)}, {}, "it did not vary beta."),
        (
            {**FORMER, "--lr": pl.uniform(2, 3)},
            {},
            "no result of sweep tuned_1700000000_00000001 fits this space: --lr",
        ),
        (FORMER, {"metric": "accuracy"}, "with a value of accuracy. Its trials have logged loss."),
        (FORMER, {"sampler": "random"}, "warm_start with the sampler 'random', which learns nothing"),
        (FORMER, {"warm_start": ("none",)}, "there is no run 'none'"),
        (FORMER, {"warm_start": (f"{SWEEP_ID}_0",)}, "is not a sweep; its kind is script"),
    ]
    for space, values, said in wrong:
        with pytest.raises(SweepError) as caught:
            results(tmp_path, space, **values)
        assert said in str(caught.value), said
