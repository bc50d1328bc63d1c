"""The trials of a sweep, read from its children."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import series, states, store, tags_and_properties
from paceline.runs.metrics import MetricLog
from paceline.sweeps import trial_runs
from paceline.sweeps.curves import Watch
from paceline.sweeps.expressions import is_number
from paceline.sweeps.results import best_row, lineage
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.sweeps.trial_runs import EndedTrials, child_id, keep, trials
from tests.sweeps.made import add_trial, make_sweep

SPEC = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize", stop=pl.ASHA(promote=True))

ENDED_SPEC = SweepSpec(space=Space({"x": pl.choice([1, 2], None, "c")}), metric="loss", goal="minimize")


def test_run_id_of_a_trial_has_the_trial_number_and_from_the_second_run_on_the_run_number() -> None:
    assert [child_id("s", 3), child_id("s", 3, 2)] == ["s_3", "s_3_2"]


def test_runs_of_a_resumed_trial_form_one_series(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    first = add_trial(sweep, 0, {"x": 0.1}, (4.0, 3.0, 2.5), states.CANCELED, first_step=0)
    tags_and_properties.set_tags(first.notes, {"paused": "it waits", "rung": "2"})
    told = {"from": first.run_id, "rung": 6, "why": "it is good"}
    add_trial(sweep, 0, {"x": 0.2}, (2.0, 1.0), states.COMPLETED, leg=2, first_step=2, told=told)
    add_trial(sweep, 1, {"x": 0.3}, (4.0, 3.0), states.CANCELED, first_step=0)
    trial, other = trial_runs.trials(sweep, SPEC)
    assert (trial.run_id, trial.status, trial.rung) == (f"{sweep.run_id}_0_2", states.COMPLETED, 6)
    assert (trial.curve, trial.begin) == ((4.0, 3.0, 2.0, 1.0), 2)
    assert [leg.curve for leg in trial.legs] == [(4.0, 3.0, 2.5), (2.0, 1.0)]
    assert [leg.source for leg in trial.legs] == [None, first.run_id]
    assert (trial.is_paused, other.is_paused, other.earlier) == (False, False, ())
    # Without a policy that pauses trials, each trial has one run, whatever folders exist.
    stopping = SweepSpec(space=SPEC.space, metric="loss", goal="minimize", stop=pl.ASHA())
    assert [found.run_id for found in trial_runs.trials(sweep, stopping)] == [first.run_id, other.run_id]
    assert [row["run_id"] for row in lineage([trial], SPEC)] == [first.run_id, trial.run_id]
    assert best_row(trial, SPEC)["x"] == 0.2


def test_value_that_a_restarted_attempt_replaces_is_read_without_further_values(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    run = add_trial(sweep, 0, {"x": 0.1}, (4.0, 3.0), states.RUNNING, first_step=1)
    (trial,) = trial_runs.trials(sweep, SPEC)
    watch = Watch(trial, tmp_path, SPEC)
    trial = watch.look(trial)
    assert trial.curve == (4.0, 3.0)
    assert watch.look(trial) is trial
    MetricLog(run.metric_log(0, 2), attempt=2).scalar("loss", 9.0, 2)
    assert read_again(watch, trial).curve == (4.0, 9.0)


def read_again(watch: Watch, trial: Trial) -> Trial:
    """Return the trial as the watch reads it after its next listing of the folder."""
    limit_s = time.monotonic() + 30
    while (found := watch.look(trial)) is trial and time.monotonic() < limit_s:
        time.sleep(0.05)
    return found


def test_integer_larger_than_any_float_is_read_as_infinity(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    run = add_trial(sweep, 0, {"x": 0.1}, status=states.RUNNING)
    log = MetricLog(run.metric_log(0))
    log.scalar("loss", 10**400, 10**400)
    log.scalar("loss", -(10**400))
    for attempts in (1, 2):
        assert trial_runs.trials(sweep, SPEC)[0].curve == (math.inf, -math.inf)
        # Readers join the logs of several attempts in another way.
        MetricLog(run.metric_log(0, attempts + 1), attempt=attempts + 1).scalar("other", 1.0)
    assert series.read(run.metrics)["loss"].max == 10**400
    assert not is_number(10**400)


def test_metric_values_without_steps_of_resumed_trial_runs_are_concatenated(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    add_trial(sweep, 0, {"x": 0.1}, (4.0, 3.0), states.CANCELED)
    add_trial(sweep, 0, {"x": 0.1}, (2.0,), states.COMPLETED, leg=2)
    assert trial_runs.trials(sweep, SPEC)[0].curve == (4.0, 3.0, 2.0)


def test_best_run_of_a_resumed_trial_is_the_run_that_logged_the_best_value(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    add_trial(sweep, 0, {"x": 0.1}, (1.0,), states.CANCELED, first_step=0)
    add_trial(sweep, 0, {"x": 0.2}, (3.0,), states.COMPLETED, leg=2, first_step=1)
    (trial,) = trial_runs.trials(sweep, SPEC)
    assert best_row(trial, SPEC)["run_id"] == f"{sweep.run_id}_0"
    assert best_row(trial, SPEC)["x"] == 0.1


def test_trial_runs_are_sorted_by_number_and_resumption(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    for number in (0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9):
        add_trial(sweep, number, {"x": 0.1})
    add_trial(sweep, 1, {"x": 0.1}, leg=2)
    names = [run_id.removeprefix(sweep.run_id) for run_id in store.ids(tmp_path)]
    assert names == ["_10", *(f"_{number}" for number in range(9, 1, -1)), "_1_2", "_1", "_0", ""]


@pytest.mark.promise("read-ended-trials-kept-would")
def test_cached_trials_equal_those_read_from_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path, ENDED_SPEC)
    add_trial(sweep, 0, {"x": [1, 2]}, (3.0, float("inf"), -2.5), chosen={"x": 0})
    add_trial(sweep, 1, {"x": None}, (), states.FAILED, chosen={"x": 1})
    add_trial(sweep, 2, {"x": "c"}, (1.0,), states.RUNNING)
    read = trials(sweep, ENDED_SPEC)
    for trial in read[:2]:
        keep(sweep, trial)
    looked: list[int] = []
    whole = trial_runs.trial_of
    monkeypatch.setattr(trial_runs, "trial_of", lambda *a, **k: looked.append(1) or whole(*a, **k))
    assert trials(sweep, ENDED_SPEC) == read
    # Only the running trial was read.
    assert len(looked) == 1


@pytest.mark.promise("read-ended-trials-kept-would")
def test_cached_trial_is_read_again_after_its_run_has_changed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, ENDED_SPEC)
    child = add_trial(sweep, 0, {"x": "c"}, (3.0,))
    keep(sweep, trials(sweep, ENDED_SPEC)[0])
    assert EndedTrials(sweep).get(0) is not None
    os.utime(child.state, ns=(1, 1))
    assert EndedTrials(sweep).get(0) is None
    child.state.unlink()
    assert trials(sweep, ENDED_SPEC) == []


def test_torn_or_foreign_lines_of_cached_trials_are_skipped(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, ENDED_SPEC)
    child = add_trial(sweep, 0, {"x": "c"}, (3.0,))
    keep(sweep, trials(sweep, ENDED_SPEC)[0])
    kept = sweep.path / "ended.jsonl"
    line = kept.read_text()
    kept.write_text(line.replace('"values"', '"novelty"') + line[:-20])
    assert EndedTrials(sweep).get(0) is None
    assert trials(sweep, ENDED_SPEC)[0].run_id == store.stored(child).run_id
    kept.write_text("[]\n1\n{}\n" + line)
    assert EndedTrials(sweep).get(0) == trials(sweep, ENDED_SPEC)[0]
