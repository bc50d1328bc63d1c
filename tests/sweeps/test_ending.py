"""Why a sweep ends before its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.job.job import Job
from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.sweeps import ending
from paceline.sweeps.results import MORE
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import count_anew
from paceline.sweeps.sweep_state import SweepState
from paceline.system.files import write_json
from tests.sweeps.made import add_trial, make_sweep


def failed_with(tmp_path: Path, *errors: str, **values: Any) -> RunFolder:
    """A sweep that runs, whose trials have failed with these errors."""
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", **values)
    folder = make_sweep(tmp_path / "runs", spec, states.RUNNING, job=Job(entry_script="train.py"))
    for number, error in enumerate(errors):
        report = FailureReport(cause="exception", message="rank 0 failed", exception=error)
        add_trial(folder, number, {"x": 0.5}, (1.0,), states.FAILED, chosen={"x": 0.5}, failure=report)
    return folder


def wanted(folder: RunFolder) -> str | None:
    sweep = SweepState(folder)
    sweep.take_up()
    return ending.wanted(sweep)


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
def test_the_common_cause_is_told(errors: list[str], said: str, tmp_path: Path) -> None:
    folder = failed_with(tmp_path, *errors, max_failures=len(errors))
    assert wanted(folder) == f"{len(errors)} trials have failed, and max_failures is {len(errors)}. {said}"


def test_what_ended_a_sweep_does_not_end_it_again_when_more_is_asked_for(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, "E", "E", max_failures=2, max_duration_seconds=3600.0, trials=8)
    record = store.stored(folder)
    assert "max_failures is 2" in str(wanted(folder))
    store.change(folder, record, states.RUNNING, started_utc="2020-01-01T00:00:00.000Z")
    assert wanted(folder) == "the sweep has come to its limit of 3600 s"
    write_json(folder.path / MORE, {"trials": 3})
    count_anew(folder)
    assert not (folder.path / MORE).exists()
    # Three more than there are, and not the six that were left.
    assert store.stored(folder).sweep["trials"] == 5  # type: ignore[index]
    assert wanted(folder) is None
    for number in (2, 3):
        add_trial(folder, number, {"x": 0.5}, (1.0,), states.FAILED, chosen={"x": 0.5})
    assert "2 trials have failed" in str(wanted(folder))


def test_trials_without_the_metric_end_a_sweep_and_count_anew_with_more(tmp_path: Path) -> None:
    folder = failed_with(tmp_path)
    for number in range(3):
        add_trial(folder, number, {"x": 0.5}, (1.0,), metric="other", chosen={"x": 0.5})
    assert "3 trials have ended, and none has logged the primary metric" in str(wanted(folder))
    write_json(folder.path / MORE, {"trials": 5})
    count_anew(folder)
    assert wanted(folder) is None
