"""Why a sweep ends before its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paceline as pl
from paceline.job.job import Job
from paceline.runs import read, states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.sweeps import ending
from paceline.sweeps.__main__ import _more_is_asked
from paceline.sweeps.results import MORE
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import count_anew
from paceline.sweeps.sweep_state import SweepState
from paceline.system.files import write_json
from tests.sweeps.made import add_trial, make_sweep


def failed_with(tmp_path: Path, *errors: str, **values: Any) -> RunFolder:
    """A sweep that runs, whose trials have failed with these errors."""
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", **{"trials": len(errors) or 3, **values})
    folder = make_sweep(tmp_path / "runs", spec, states.RUNNING, job=Job(entry_script="train.py"))
    for number, error in enumerate(errors):
        report = FailureReport(
            cause="exception", message="rank 0 failed", exception=error, see=f"paceline logs trial {number}"
        )
        add_trial(folder, number, {"x": 0.5}, (), states.FAILED, chosen={"x": 0.5}, failure=report)
    return folder


def wanted(folder: RunFolder) -> str | None:
    sweep = SweepState(folder)
    sweep.take_up()
    return ending.wanted(sweep)


def test_the_common_cause_is_told_and_where_there_is_more_of_it(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, "E: a", "E: a")
    sweep = SweepState(folder)
    sweep.take_up()
    ending.write(sweep)
    report = store.stored(folder).failure
    assert report is not None
    assert report.message == "all trials have failed. 2 of 2 failed with the same error: E: a"
    assert report.see == "paceline logs trial 0"


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


def test_only_trial_without_the_metric_is_spoken_of_in_the_singular(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, trials=1)
    add_trial(folder, 0, {"x": 0.5}, (1.0,), metric="other", chosen={"x": 0.5})
    assert "1 trial has ended, and it has not logged the primary metric" in str(wanted(folder))


def test_trials_without_the_metric_end_a_sweep_and_count_anew_with_more(tmp_path: Path) -> None:
    folder = failed_with(tmp_path)
    for number in range(3):
        add_trial(folder, number, {"x": 0.5}, (1.0,), metric="other", chosen={"x": 0.5})
    assert "3 trials have ended, and none has logged the primary metric" in str(wanted(folder))
    # As the controller finds it that has just written the end.
    assert not _more_is_asked(folder)
    write_json(folder.path / MORE, {"trials": 5})
    assert _more_is_asked(folder)
    assert store.stored(folder).sweep["trials"] == 8  # type: ignore[index]
    assert wanted(folder) is None


def test_a_sweep_that_was_failed_from_outside_says_so_and_waits_for_nothing(tmp_path: Path, capsys: Any) -> None:
    """Its log said Canceled, and its record went on to name the engine that did not take the next trial."""
    folder = failed_with(tmp_path)
    sweep = SweepState(folder)
    sweep.wait_for("compute target 'cluster', which does not take trial 0")
    read.request_cancel(folder, by="somebody", reason="fail()", fail="it is enough")
    ending.write(sweep)
    record = store.stored(folder)
    assert (record.status, record.waiting_for) == (states.FAILED, None)
    assert "the sweep is Failed" in capsys.readouterr().out
