from __future__ import annotations

import dataclasses

from paceline.sweeps.pictures import figure_data as module
from paceline.sweeps.pictures.figure_data import sketch
from paceline.sweeps.results import best_trials
from tests.sweeps.pictures.trials import HOSTILE, SPEC, SPEC_OF_TWO, make_trials, make_trials_of_two


def test_parallel_coordinates_draw_each_trial_and_the_best_last():
    trials = make_trials()
    drawn = sketch("title", SPEC, trials)
    # The constant has no column. `momentum` and `optimizer.beta`, which exist only for one choice each, have columns.
    assert [column.name for column in drawn.columns] == [
        *("lr", HOSTILE.replace(" ", "_").replace("=", "_"), "momentum", "optimizer.beta", "layers", f"loss {HOSTILE}"),
    ]
    assert len(drawn.lines) == 40
    best = min((t for t in trials if t.best("minimize") is not None), key=lambda t: t.best("minimize") or 0)
    assert (drawn.lines[-1].number, drawn.lines[-1].shade, drawn.lines[-1].places[-1]) == (best.number, 1.0, 0.0)
    for line in drawn.lines:
        # Each trial has either `momentum` or `optimizer.beta`. Trials 3 and 7 have no finite value.
        assert (line.places[2] is None) != (line.places[3] is None)
        assert (line.places[-1] is None) == (line.shade is None) == (line.number in (3, 7))


def test_history_figure_has_the_best_value_so_far():
    drawn = sketch("title", dataclasses.replace(SPEC, goal="maximize"), make_trials())
    (history,) = drawn.histories
    assert len(history.points) == 38
    places = [place for _, place in history.best]
    assert places == sorted(places)
    assert places[-1] == max(place for _, place, _ in history.points)


def test_sweep_figures_of_many_trials_draw_only_the_best_trials(monkeypatch):
    monkeypatch.setattr(module, "MOST", 10)
    drawn = sketch("title", SPEC, make_trials())
    assert (drawn.count, len(drawn.lines)) == (40, 10)
    assert drawn.remarks == ("The best 10 of 40 trials are drawn.",)
    assert len(drawn.histories[0].points) <= 20


def test_sweep_without_trials_or_values_is_drawn():
    assert sketch("title", SPEC, []).histories == ()
    drawn = sketch("title", SPEC, [make_trials(4)[3]])
    assert (drawn.histories, len(drawn.lines)) == ((), 1)


def test_figure_of_several_metrics_has_a_history_for_each_and_a_pareto_front():
    trials = make_trials_of_two()
    drawn = sketch("title", SPEC_OF_TWO, trials)
    assert [column.name for column in drawn.columns[-2:]] == [f"loss {HOSTILE}", "size"]
    assert [history.name for history in drawn.histories] == [f"loss {HOSTILE}", "size"]
    (front,) = drawn.fronts
    on_front = {trial.number for trial in best_trials(trials, SPEC_OF_TWO)}
    assert len(front.best) == len(on_front) > 1
    # Both metrics are minimized: on the Pareto front, a trial that is better in one metric is worse in the other.
    assert list(front.best) == sorted(front.best, key=lambda places: -places[1])
    assert {line.number for line in drawn.lines if line.shade == 1.0} == on_front
    shown = {number for number, _, _ in front.points}
    assert shown == {trial.number for trial in trials} - {3, 7, 9}
