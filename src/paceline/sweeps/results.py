"""The results of a sweep: its best trials, and the tables in its outputs."""

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
from paceline.system import locks
from paceline.system.files import read_json, write_whole
from paceline.system.units import value_text

#: File in the sweep's folder with a request for more trials.
MORE = "more.json"
#: Names of two files in the sweep's outputs: the table of trials, and the table of lineages.
TABLE, LINEAGE = "trials.csv", "lineage.csv"
#: Columns that only the table of lineages has. A hyperparameter with one of these names gets another column name.
_LINEAGE = ("from", "why", "best", "last")

#: Columns of the table of trials before the metrics.
BEFORE = ("trial", "run_id", "status")
AFTER = ("intervals", "started_utc", "duration_s")  # columns of the table of trials after the metrics
#: Column that says whether a trial is on the Pareto front, if there are several metrics.
FRONT = "front"


def requested(folder: RunFolder) -> int:
    """Return how many trials users have added to the sweep by `SweepRun.more`."""
    request = read_json(folder.path / MORE)
    trials = request.get("trials") if isinstance(request, dict) else None
    return trials if isinstance(trials, int) else 0


def more_locked(folder: RunFolder) -> contextlib.AbstractContextManager[int]:
    """Lock the request for more trials while a process reads and changes it."""
    return locks.locked(folder.path / f"{MORE}.lock")


def best_trial(trials: Sequence[Trial], spec: SweepSpec) -> Trial | None:
    """Return the best trial, or the first on the Pareto front; None without values."""
    return next(iter(best_trials(trials, spec)), None)


def best_trials(trials: Sequence[Trial], spec: SweepSpec) -> list[Trial]:
    """Return [best trial], or with several metrics the Pareto front; [] without values."""
    if spec.further:
        return front(trials, spec.goals)
    order = ranked(trials, spec.goal)[:1]
    return order if order and order[0].best(spec.goal) is not None else []


def values_of(trial: Trial, spec: SweepSpec) -> tuple[float | None, ...]:
    """Return a trial's best value or, with several metrics, their last values; None if missing."""
    if spec.further:
        return tuple(curve[-1] if curve else None for curve in trial.curves)
    return (trial.best(spec.goal),)


def values_text(trial: Trial, spec: SweepSpec) -> str:
    """Return `values_of` as text, without missing values: "accuracy 0.91, latency 12"."""
    known = zip(spec.metrics, values_of(trial, spec), strict=False)
    return ", ".join(f"{name} {value:g}" for name, value in known if value is not None)


def point_text(values: Mapping[str, object]) -> str:
    """Return hyperparameters as text: "lr=0.1, layers=3"."""
    return ", ".join(f"{name.lstrip('-')}={value_text(value)}" for name, value in values.items())


def rows(trials: Sequence[Trial], spec: SweepSpec) -> list[dict[str, Any]]:
    """Return a row of the trials' table for each trial, as a dict.

    Keys: trial, run_id, status, the metric's best value, intervals (number of values), started_utc, duration_s, and
    each hyperparameter. Leading dashes are removed unless the name is another column's, as in `--status`. With several
    metrics, the row has the last value of each metric, and "front": whether the trial is on the Pareto front.
    """
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


def best_row(trial: Trial, spec: SweepSpec) -> dict[str, object]:
    """Return a trial's row for its best run, with that run's id and hyperparameters."""
    leg = trial.best_leg(spec.goal)
    return rows([dataclasses.replace(trial, run_id=leg.run_id, values=leg.values)], spec)[0]


def lineage(trials: Sequence[Trial], spec: SweepSpec) -> list[dict[str, Any]]:
    """Return a table row for each run of each trial, as a dict.

    Keys: trial, run_id, from (run that gave the checkpoints), why (reason for the run), status, best and last (values
    that this run logged), intervals (number of these values), and each hyperparameter.
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


def column_names(rows: Sequence[Mapping[str, object]], spec: SweepSpec) -> list[str]:
    """Return the columns of all rows, hyperparameters last.

    Not every row has every hyperparameter: an option of a choice may have hyperparameters of its own.
    """
    own = (*BEFORE, *map(metric_column, spec.metrics), *((FRONT,) if spec.further else ()), *AFTER)
    return list(dict.fromkeys((*own, *(name for row in rows for name in row))))


def write_table(folder: RunFolder, spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Write `outputs/trials.csv`, and `lineage.csv` if the policy pauses trials.

    Errors such as a full disk are ignored, because they must not fail the sweep.
    """
    table = rows(trials, spec)
    _write(folder.outputs / TABLE, column_names(table, spec), table)
    if pausing(spec.stop):
        runs = lineage(trials, spec)
        _write(folder.outputs / LINEAGE, list(dict.fromkeys(name for row in runs for name in row)), runs)


def _write(path: Path, columns: Sequence[str], table: Sequence[Mapping[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in table)
    with contextlib.suppress(OSError):
        write_whole(path, text.getvalue())


def _cell(value: object) -> object:
    # Write nested values as JSON, as in the script's arguments.
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value


def metric_column(metric: str) -> str:
    """Return a metric's column name, with " (metric)" if a fixed column has this name."""
    return f"{metric} (metric)" if metric in (*BEFORE, *AFTER, FRONT) else metric


def parameter_column(name: str, metrics: Iterable[str]) -> str:
    """Return a hyperparameter's column name, with dashes if a column has the name already."""
    plain = name.lstrip("-")
    if plain not in {*BEFORE, *AFTER, FRONT, *map(metric_column, metrics)}:
        return plain
    # If even the name with dashes is the name of a metric, add "(parameter)" to the hyperparameter's name.
    return argument(name) if argument(name) not in metrics else f"{argument(name)} (parameter)"
