"""The names of a table's columns, where a trial's own columns, the metric and the hyperparameters may have one name."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.sweeps.space import argument

#: What a trial has whatever is tried, in the order of the table; the metric stands before the fourth.
BEFORE = ("trial", "run_id", "status")
AFTER = ("intervals", "started_utc", "duration_s")
#: With several metrics, whether a trial is on the Pareto front.
FRONT = "front"


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
