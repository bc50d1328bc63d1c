"""What came of a sweep: its trials in order, the best of them, and the table in its outputs."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.space import argument
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial, best, front, ranked
from paceline.system.files import write_whole

#: In the sweep's folder while more trials are asked for than it was made with.
MORE = "more.json"
#: In the sweep's outputs.
TABLE, LINEAGE = "trials.csv", "lineage.csv"
#: Columns of the second beside those of the first.
_LINEAGE = ("from", "why", "best", "last")

#: What a trial has whatever is tried, in the order of the table; the metric stands before the fourth.
BEFORE = ("trial", "run_id", "status")
AFTER = ("intervals", "started_utc", "duration_s")
#: With several metrics, whether a trial is on the Pareto front.
FRONT = "front"


def best_trial(trials: Sequence[Trial], spec: SweepSpec) -> Trial | None:
    """The trial with the best value of the primary metric at any time, the first of the Pareto front with several metrics; None
    where none has one.
    """
    return next(iter(best_trials(trials, spec)), None)


def best_trials(trials: Sequence[Trial], spec: SweepSpec) -> list[Trial]:
    """The best trial alone, or with several metrics those on the Pareto front, the best by the first metric first."""
    if spec.further:
        return front(trials, spec.goals)
    order = ranked(trials, spec.goal)[:1]
    return order if order and order[0].best(spec.goal) is not None else []


def values_of(trial: Trial, spec: SweepSpec) -> tuple[float | None, ...]:
    """What a trial has come to: its best value, or with several metrics the last of each; None where it has none."""
    if spec.further:
        return tuple(curve[-1] if curve else None for curve in trial.curves)
    return (trial.best(spec.goal),)


def said(trial: Trial, spec: SweepSpec) -> str:
    """The same as a text, without what is not there: "accuracy 0.91, latency 12"."""
    known = zip(spec.metrics, values_of(trial, spec), strict=False)
    return ", ".join(f"{name} {value:g}" for name, value in known if value is not None)


def rows(trials: Sequence[Trial], spec: SweepSpec) -> list[dict[str, Any]]:
    """A mapping for each trial: trial, run_id, status, the metric's best value, intervals (how many values it has),
    started_utc, duration_s, and each hyperparameter. One whose name is taken keeps its dashes: `--status`.

    With several metrics the last value of each, and front: whether the trial is on the Pareto front.
    """
    # Of the best ones of several metrics alone, those on the front are the same as of all.
    on_front = {trial.number for trial in best_trials(trials, spec)} if spec.further else set()
    return [
        {
            "trial": trial.number,
            "run_id": trial.run_id,
            "status": trial.shown,
            **dict(zip(map(metric_column, spec.metrics), values_of(trial, spec), strict=False)),
            **({FRONT: trial.number in on_front} if spec.further else {}),
            "intervals": len(trial.curve),
            "started_utc": trial.started_utc,
            "duration_s": trial.duration_s,
            **{parameter_column(name, spec.metrics): value for name, value in trial.values.items()},
        }
        for trial in trials
    ]


def best_row(trial: Trial, spec: SweepSpec) -> dict[str, Any]:
    """The row of a trial, with the run that logged its best value, and the hyperparameters that this one had."""
    leg = trial.best_leg(spec.goal)
    return rows([dataclasses.replace(trial, run_id=leg.run_id, values=leg.values)], spec)[0]


def lineage(trials: Sequence[Trial], spec: SweepSpec) -> list[dict[str, Any]]:
    """A mapping for each run of each trial: trial, run_id, from (the run whose checkpoints it was given), why, status, the best
    and the last value that it logged itself, intervals (how many), and each hyperparameter.
    """
    return [
        {
            "trial": trial.number,
            "run_id": leg.run_id,
            "from": leg.source,
            "why": leg.why,
            "status": trial.shown if leg.run_id == trial.run_id else leg.status,
            "best": best(leg.curve, spec.goal),
            "last": leg.curve[-1] if leg.curve else None,
            "intervals": len(leg.curve),
            **{parameter_column(name, _LINEAGE): value for name, value in leg.values.items()},
        }
        for trial in trials
        for leg in trial.legs
    ]


def column_names(rows: Sequence[Mapping[str, Any]], spec: SweepSpec) -> list[str]:
    """The columns of a table of these rows. Branches of a choice bring names of their own, so rows differ: the columns are all
    of them, in order of appearance.
    """
    own = (*BEFORE, *map(metric_column, spec.metrics), *((FRONT,) if spec.further else ()), *AFTER)
    return list(dict.fromkeys((*own, *(name for row in rows for name in row))))


def write_table(folder: RunFolder, spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Write `outputs/trials.csv`, and `lineage.csv` where trials have several runs.

    A full disk is no reason for a sweep to fail.
    """
    table = rows(trials, spec)
    _write(folder.outputs / TABLE, column_names(table, spec), table)
    if pausing(spec.stop):
        runs = lineage(trials, spec)
        _write(folder.outputs / LINEAGE, list(dict.fromkeys(name for row in runs for name in row)), runs)


def _write(path: Path, columns: Sequence[str], table: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in table)
    with contextlib.suppress(OSError):
        write_whole(path, text.getvalue())


def _cell(value: Any) -> Any:
    # As the script gets them, and as other programs can read them.
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value


def metric_column(metric: str) -> str:
    """The metric's own name; `status (metric)` of a metric that is called as a trial's own column."""
    return f"{metric} (metric)" if metric in (*BEFORE, *AFTER, FRONT) else metric


def parameter_column(name: str, metrics: Iterable[str]) -> str:
    """A hyperparameter's name without its dashes; with them, `--status`, where that is a column's name already."""
    plain = name.lstrip("-")
    if plain not in {*BEFORE, *AFTER, FRONT, *map(metric_column, metrics)}:
        return plain
    # A metric may be called `--loss`, and is no reason to lose one of the two.
    return argument(name) if argument(name) not in metrics else f"{argument(name)} (parameter)"
