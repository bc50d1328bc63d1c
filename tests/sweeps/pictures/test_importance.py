from __future__ import annotations

import dataclasses

import pytest

from paceline.sweeps.pictures import importance
from paceline.sweeps.pictures.importance import LEAST, importances
from tests.sweeps.pictures.trials import SPEC, make_trials


def valued(trials):
    return [(trial, value) for trial in trials if (value := trial.best("minimize")) is not None]


def test_parameter_that_determines_the_metric_is_most_important():
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    found = importances(valued(make_trials()), SPEC.space)
    shares = {one.name: one for one in found}
    assert found[0].name == "lr"
    assert found[0].share > 0.9
    assert [one.share for one in found] == sorted((one.share for one in found), reverse=True)
    # The constant `seed` has no importance. The importance of `momentum`, which only some trials have, is computed from
    # these trials.
    assert "seed" not in shares
    assert shares["momentum"].is_conditional
    assert LEAST <= shares["momentum"].trials < found[0].trials == 38
    assert importances(valued(make_trials()), SPEC.space) == found


def test_importance_is_empty_for_few_trials_or_equal_metric_values():
    assert importances(valued(make_trials(LEAST - 1)), SPEC.space) == ()
    same = [dataclasses.replace(trial, curve=(1.0,)) for trial in make_trials()]
    assert importances(valued(same), SPEC.space) == ()


def test_missing_scikit_learn_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importance.importlib.util, "find_spec", lambda name: None if name == "sklearn" else object())
    said = "Importance is left out: it needs scikit-learn. pip install 'paceline[tune]'."
    assert importance.missing() == said
