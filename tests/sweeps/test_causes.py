"""What most of the failed trials have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from paceline.job.job import Job
from paceline.runs import states
from paceline.runs.failure import FailureReport
from paceline.sweeps import causes
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.sweep_state import SweepState
from tests.sweeps.made import add_trial, make_sweep

LEFT = "The worker failed: the script left with exit code 2."


def common(tmp_path: Path, *reports: FailureReport) -> causes.Cause:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss")
    folder = make_sweep(tmp_path / "runs", spec, states.RUNNING, job=Job(entry_script="train.py"))
    for number, report in enumerate(reports):
        add_trial(folder, number, {"x": 0.5}, status=states.FAILED, chosen={"x": 0.5}, failure=report)
    sweep = SweepState(folder)
    sweep.take_up()
    return causes.common(sweep, sweep.trials)


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
def test_errors_that_differ_in_numbers_are_one_cause(errors: list[str], said: str, tmp_path: Path) -> None:
    reports = [FailureReport(cause="exception", message="rank 0 failed", exception=error) for error in errors]
    assert common(tmp_path, *reports).text == said


def test_a_script_that_left_with_an_exit_code_is_told_by_its_last_line(tmp_path: Path) -> None:
    """As argparse does, which raises nothing that could be told."""
    lines = ("usage: train.py [-h]", "train.py: error: the following arguments are required: --data", "")
    left = FailureReport(cause="exception", message=LEFT, last_lines=lines, see="paceline logs s_0")
    found = common(tmp_path, left, left)
    assert found.text == f"2 of 2 failed with the same error: {LEFT} Its last line: {lines[1]}"
    assert found.see == "paceline logs s_0"


def test_a_trial_that_was_removed_says_nothing(tmp_path: Path) -> None:
    assert common(tmp_path).text == "The first error: ?"
