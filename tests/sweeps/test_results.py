"""The tables of a sweep's trials."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import paceline as pl
from paceline.sweeps import live_trials, results
from paceline.sweeps.results import metric_column, parameter_column
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial_runs import trials
from tests.sweeps.made import add_trial, make_sweep

SPEC = SweepSpec(
    space=Space({"--status": pl.choice("a", "b"), "trial": pl.uniform(0, 1), "loss": pl.choice([[1, "x"], [2, "y"]])}),
    metric="loss",
    goal="minimize",
)


@pytest.mark.promise("hyperparameter-called-column-trials-table")
def test_hyperparameter_named_like_a_result_column_gets_its_own_column(tmp_path: Path) -> None:
    # Regression: a hyperparameter named "status" replaced the trial's state, and a hyperparameter named "loss" replaced
    # the metric.
    sweep = make_sweep(tmp_path, SPEC)
    add_trial(sweep, 0, {"--status": "a", "trial": 0.5, "loss": [1, "x"]}, (3.0, 2.0))
    (row,) = results.rows(trials(sweep, SPEC), SPEC)
    assert row == {
        "trial": 0,
        "run_id": f"{sweep.run_id}_0",
        "status": "Completed",
        "loss": 2.0,
        "intervals": 2,
        "started_utc": "2026-01-01T00:00:00.000Z",
        "duration_s": 5.0,
        "--status": "a",
        "--trial": 0.5,
        "--loss": [1, "x"],
    }


def test_trials_table_in_outputs_writes_lists_as_json(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC)
    add_trial(sweep, 0, {"--status": "a", "loss": [1, "x"]}, (3.0,))
    add_trial(sweep, 1, {"--status": None, "trial": 0.5})
    results.write_table(sweep, SPEC, trials(sweep, SPEC))
    with (sweep.outputs / results.TABLE).open() as file:
        first, second = csv.DictReader(file)
    assert (first["status"], first["loss"], first["--loss"], first["--trial"]) == ("Completed", "3.0", '[1, "x"]', "")
    assert (second["--status"], second["loss"], second["--trial"]) == ("", "", "0.5")


def test_trials_table_has_its_result_columns_before_the_first_trial():
    assert results.column_names([], SPEC) == [
        *("trial", "run_id", "status", "loss", "intervals", "started_utc", "duration_s"),
    ]


def test_notebook_shows_trials_and_ctrl_c_prints_how_to_reattach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = pl.Workspace(tmp_path / "workspace")
    sweep = make_sweep(workspace.runs_dir, SPEC)
    add_trial(sweep, 0, {"--status": "<b>"}, (3.0, 2.0))
    run = workspace.get_run(sweep.run_id)
    assert "<td>&lt;b&gt;</td>" in run._repr_html_()
    assert sweep.run_id in run._repr_html_()

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live_trials, "follow", pressed)
    with pytest.raises(KeyboardInterrupt):
        run.wait_for_completion(show_output=True)
    assert f"paceline sweep show -f {sweep.run_id}" in capsys.readouterr().err


def test_parameter_column_is_named_without_dashes_unless_that_name_is_a_result_column():
    assert parameter_column("--lr", ("loss",)) == "lr"
    assert parameter_column("status", ("loss",)) == "--status"
    assert parameter_column("--loss", ("loss",)) == "--loss"
    assert parameter_column("loss", ("loss", "--loss")) == "--loss (parameter)"


def test_metric_named_like_a_trial_column_gets_its_own_column():
    assert metric_column("accuracy") == "accuracy"
    assert metric_column("status") == "status (metric)"
