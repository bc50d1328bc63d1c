"""What most of the failed trials have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.job.job import Job
from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.sweeps import diagnosis
from paceline.sweeps.diagnosis import warn_of
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.sweep_state import SweepState
from tests.sweeps.made import add_trial, log_values, make_sweep

LEFT = "The worker failed: the script left with exit code 2."


def common(tmp_path: Path, *reports: FailureReport) -> diagnosis.Cause:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss")
    folder = make_sweep(tmp_path / "runs", spec, states.RUNNING, job=Job(entry_script="train.py"))
    for number, report in enumerate(reports):
        add_trial(folder, number, {"x": 0.5}, status=states.FAILED, chosen={"x": 0.5}, failure=report)
    sweep = SweepState(folder)
    sweep.take_up()
    return diagnosis.common(sweep, sweep.trials)


@pytest.mark.promise("metric-never-comes-common-cause")
@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (["E: a", "E: b", "E: a"], "2 of 3 failed with the same error: E: a"),
        (["E: a", "no such file"], "The first error: E: a"),
        (
            ["E: lr=1e-05 at 0x7f3a", "E: lr=0.25 at 0x7f00", "F", "E: lr=-3 at 0x1"],
            "3 of 4 failed with the same error, but for its numbers: E: lr=1e-05 at 0x7f3a",
        ),
    ],
)
def test_errors_of_trials_that_differ_only_in_numbers_share_a_cause(
    errors: list[str], said: str, tmp_path: Path
) -> None:
    reports = [FailureReport(cause="exception", message="rank 0 failed", exception=error) for error in errors]
    assert common(tmp_path, *reports).text == said


@pytest.mark.promise("metric-never-comes-common-cause")
def test_common_failure_by_exit_code_quotes_the_last_log_line(tmp_path: Path) -> None:
    """As argparse does, which raises no exception with a message."""
    lines = ("usage: train.py [-h]", "train.py: error: the following arguments are required: --data", "")
    left = FailureReport(cause="exception", message=LEFT, last_lines=lines, see="paceline logs s_0")
    found = common(tmp_path, left, left)
    assert found.text == f"2 of 2 failed with the same error: {LEFT} Its last line: {lines[1]}"
    assert found.see == "paceline logs s_0"


def test_diagnosis_of_a_removed_trial_has_no_error_text(tmp_path: Path) -> None:
    assert common(tmp_path).text == "The first error: ?"


def told(tmp_path: Path, curves: list[Any], others: Any = (), **values: Any) -> tuple[str, ...]:
    """The warnings of a sweep whose trials have ended with these curves. others: what rank 1 of each has logged."""
    values = {"metric": "loss", "goal": "minimize", **values}
    workers = {"process_count_per_node": 2, "distributed_backend": "gloo"} if others else {}
    job = Job(entry_script="train.py", **workers)  # type: ignore[arg-type]
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), **values)
    folder = make_sweep(tmp_path / "runs", spec, states.RUNNING, job=job)
    for number, curve in enumerate(curves):
        child = add_trial(folder, number, {"x": 0.5}, tuple(curve), chosen={"x": 0.5})
        if others:
            log_values(child, "loss", tuple(others), rank=1)
    sweep = SweepState(folder)
    sweep.take_up()
    for trial in sweep.trials:
        warn_of(sweep, trial)
    return store.stored(folder).warnings


NAN, INF = math.nan, math.inf


@pytest.mark.promise("strange-about-metric-said-one")
@pytest.mark.parametrize(
    ("curves", "values", "said"),
    [
        ([[]], {}, "trial 0 has ended without a value of the primary metric 'loss'. It logged nothing"),
        ([[0.5]], {"metric": "Loss"}, "the primary metric 'Loss'. It logged loss."),
        ([[0.5]], {"further": (("size", "minimize"),)}, "without a value of the metric 'size'. It logged loss."),
        (
            [[NAN]],
            {},
            "the one value of 'loss' that trial 0 has logged is not a finite number (nan): what is no finite",
        ),
        ([[NAN, NAN]], {}, "all 2 values of 'loss' that trial 0 has logged are not finite numbers (nan)"),
        (
            [[0.5], [0.4, INF, -INF, INF]],
            {},
            "3 of the 4 values of 'loss' that trial 1 has logged are not finite",
        ),
        (
            [[3, 2, 1], [3, 2, 2.5], [2, 1, 0]],
            {"goal": "maximize"},
            "in each of the 3 trials that have ended, 'loss' falls from its first value on, and the sweep is to maximize it: "
            "if that is the wrong way round, give goal='minimize' (--minimize).",
        ),
        ([[1, 2, 3]] * 4, {}, "'loss' rises from its first value on, and the sweep is to minimize it"),
    ],
)
def test_missing_nonfinite_or_worsening_metric_values_of_trials_give_one_warning(
    curves: Any, values: Any, said: str, tmp_path: Path
) -> None:
    warnings = told(tmp_path, curves, **values)
    assert len(warnings) == 1
    assert said in warnings[0]


@pytest.mark.promise("strange-about-metric-said-one")
@pytest.mark.parametrize(
    ("curves", "values"),
    [
        ([[3, 2, 1]] * 5, {}),
        ([[1, 2, 3], [1, 2, 3], [2, 1, 3]], {}),  # one of the trials had improved
        ([[1, 2, 3]] * 2, {}),  # two trials are too few
        ([[1, 2]] * 9, {}),  # two values are too few
        ([[1, 1, 1]] * 9, {}),
    ],
)
def test_ordinary_metric_curves_of_a_sweep_give_no_warning(curves: Any, values: Any, tmp_path: Path) -> None:
    assert told(tmp_path, curves, **values) == ()


@pytest.mark.promise("strange-about-metric-said-one")
def test_metric_logged_by_two_ranks_of_a_trial_with_different_values_gives_a_warning(tmp_path: Path) -> None:
    (text,) = told(tmp_path, [[3, 2, 1]] * 3, others=[9, 8, 7])
    assert text == "'loss' is logged by 2 ranks of trial 0 with different values: those of rank 0 count."
    assert told(tmp_path / "same", [[3, 2, 1]] * 3, others=[3, 2, 1]) == ()


def test_each_kind_of_warning_is_given_once(tmp_path: Path) -> None:
    assert len(told(tmp_path, [[NAN], [NAN], [], []])) == 2
