"""What is kept of trials that have ended, so that they are read again quickly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states, store
from paceline.sweeps import children
from paceline.sweeps.children import trials
from paceline.sweeps.ended import EndedTrials, keep
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from tests.sweeps.made import add_trial, make_sweep

SPEC = SweepSpec(space=Space({"x": pl.choice([1, 2], None, "c")}), metric="loss", goal="minimize")


def test_what_was_kept_is_what_would_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path, SPEC)
    add_trial(sweep, 0, {"x": [1, 2]}, (3.0, float("inf"), -2.5), chosen={"x": 0})
    add_trial(sweep, 1, {"x": None}, (), states.FAILED, chosen={"x": 1})
    add_trial(sweep, 2, {"x": "c"}, (1.0,), states.RUNNING)
    read = trials(sweep, SPEC)
    for trial in read[:2]:
        keep(sweep, trial)
    looked: list[int] = []
    whole = children.trial_of
    monkeypatch.setattr(children, "trial_of", lambda *a, **k: looked.append(1) or whole(*a, **k))
    assert trials(sweep, SPEC) == read
    # The one that runs alone.
    assert len(looked) == 1


def test_a_child_that_is_another_one_by_now_is_read(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC)
    child = add_trial(sweep, 0, {"x": "c"}, (3.0,))
    keep(sweep, trials(sweep, SPEC)[0])
    assert EndedTrials(sweep).get(0) is not None
    os.utime(child.record, ns=(1, 1))
    assert EndedTrials(sweep).get(0) is None
    child.record.unlink()
    assert trials(sweep, SPEC) == []


def test_lines_that_are_torn_or_of_another_version_are_passed_over(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC)
    child = add_trial(sweep, 0, {"x": "c"}, (3.0,))
    keep(sweep, trials(sweep, SPEC)[0])
    kept = sweep.path / "ended.jsonl"
    line = kept.read_text()
    kept.write_text(line.replace('"values"', '"novelty"') + line[:-20])
    assert EndedTrials(sweep).get(0) is None
    assert trials(sweep, SPEC)[0].run_id == store.stored(child).run_id
    kept.write_text("[]\n1\n{}\n" + line)
    assert EndedTrials(sweep).get(0) == trials(sweep, SPEC)[0]
