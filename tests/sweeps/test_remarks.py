"""What is strange about a metric, one sentence for each kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.job.job import Job
from paceline.runs import states, store
from paceline.sweeps.remarks import warn_of
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.sweep_state import SweepState
from tests.sweeps.made import add_trial, log_values, make_sweep


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


@pytest.mark.parametrize(
    ("curves", "values", "said"),
    [
        ([[]], {}, "trial 0 has ended without a value of the primary metric 'loss'. It logged nothing"),
        ([[0.5]], {"metric": "Loss"}, "the primary metric 'Loss'. It logged loss."),
        ([[0.5]], {"further": (("size", "minimize"),)}, "without a value of the metric 'size'. It logged loss."),
        ([[NAN]], {}, "the one value of 'loss' that trial 0 has logged is no finite number (nan): what is no finite"),
        ([[NAN, NAN]], {}, "all 2 values of 'loss' that trial 0 has logged are no finite numbers (nan)"),
        (
            [[0.5], [0.4, INF, -INF, INF]],
            {},
            "3 of the 4 values of 'loss' that trial 1 has logged are no finite",
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
def test_one_sentence_says_what_is_strange(curves: Any, values: Any, said: str, tmp_path: Path) -> None:
    warnings = told(tmp_path, curves, **values)
    assert len(warnings) == 1
    assert said in warnings[0]


@pytest.mark.parametrize(
    ("curves", "values"),
    [
        ([[3, 2, 1]] * 5, {}),
        ([[1, 2, 3], [1, 2, 3], [2, 1, 3]], {}),  # one of them had got better
        ([[1, 2, 3]] * 2, {}),  # two are not many
        ([[1, 2]] * 9, {}),  # nor are two values
        ([[1, 1, 1]] * 9, {}),
    ],
)
def test_nothing_is_said_of_what_is_not_strange(curves: Any, values: Any, tmp_path: Path) -> None:
    assert told(tmp_path, curves, **values) == ()


def test_what_all_ranks_log_is_told_where_it_differs(tmp_path: Path) -> None:
    (text,) = told(tmp_path, [[3, 2, 1]] * 3, others=[9, 8, 7])
    assert text == "'loss' is logged by 2 ranks of trial 0 with different values: those of rank 0 count."
    assert told(tmp_path / "same", [[3, 2, 1]] * 3, others=[3, 2, 1]) == ()


def test_each_kind_is_told_once_whatever_the_next_controller_sees(tmp_path: Path) -> None:
    assert len(told(tmp_path, [[NAN], [NAN], [], []])) == 2
