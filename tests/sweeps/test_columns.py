from __future__ import annotations

from paceline.sweeps.columns import metric_column, parameter_column


def test_a_hyperparameter_whose_name_is_taken_keeps_its_dashes():
    assert parameter_column("--lr", ("loss",)) == "lr"
    assert parameter_column("status", ("loss",)) == "--status"
    assert parameter_column("--loss", ("loss",)) == "--loss"
    assert parameter_column("loss", ("loss", "--loss")) == "--loss (parameter)"


def test_a_metric_that_is_called_as_a_column_of_the_trial_has_one_of_its_own():
    assert metric_column("accuracy") == "accuracy"
    assert metric_column("status") == "status (metric)"
