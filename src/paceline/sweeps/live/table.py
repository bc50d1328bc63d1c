"""A sweep as a table of texts: one form for `sweep show`, for a terminal that is drawn over, and for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.runs import states
from paceline.runs.follow import duration_text
from paceline.sweeps.front import ordered
from paceline.sweeps.live.board import Standing
from paceline.sweeps.results import best_trial, best_trials, values_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import SHOWN_PAUSED, Trial
from paceline.system.units import value_text

#: Column of the states in `header` and `cells`.
STATUS = 1


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is seen of a sweep. Other people's text in it is not escaped.

    lines: what stands above the table. rows: cells, all of them texts, under `header`. more: trials that have no row.
    """

    lines: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def shown(standing: Standing, most: int) -> Shown:
    """At most so many rows: the best trials, and of those that run as many as find a place; the best stand first."""
    spec = standing.spec
    order = ordered(standing.trials, spec.goals)
    # Half of the rows are kept for what goes on: of a long sweep the best ones alone would fill a screen.
    running = [trial for trial in order if not trial.is_over][: max(most // 2, most - len(order))]
    kept = {trial.number for trial in (*running, *order[: max(0, most - len(running))])}
    trials = [trial for trial in order if trial.number in kept][:most]
    names = parameters(standing.trials)
    return Shown(
        lines=lines(standing),
        header=header(names, spec),
        rows=tuple(cells(trial, names, spec) for trial in trials),
        more=len(order) - len(trials),
    )


def lines(standing: Standing) -> tuple[str, ...]:
    """How far the sweep is, its best trial, and what there is to be warned of."""
    record, spec, trials = standing.record, standing.spec, standing.trials
    paused = sum(trial.shown == SHOWN_PAUSED for trial in trials)
    over = sum(trial.is_over for trial in trials) - paused
    failed = sum(trial.status == states.FAILED for trial in trials)
    stopped = sum(trial.shown == states.CANCELED for trial in trials)
    counts = {"failed": failed, "stopped": stopped, "paused": paused, "running": len(trials) - over - paused}
    parts = [f"{over} of {spec.trials} trials ended", *(f"{count} {word}" for word, count in counts.items() if count)]
    during = "in" if record.is_terminal else "for"
    took = f" {during} {duration_text(record.duration_s)}" if record.duration_s is not None else ""
    found = [f"Sweep {record.run_id} is {record.status}{took}: {', '.join(parts)}"]
    if (best := best_trial(trials, spec)) is not None:
        if spec.further:
            numbers = [str(trial.number) for trial in best_trials(trials, spec)]
            found.append(f"Pareto front: trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}")
        else:
            found.append(f"Best: trial {best.number}, {spec.metric} {value_text(best.best(spec.goal))}{_said(best)}")
    found += [f"Warning: {text}" for text in record.warnings]
    if record.failure is not None:
        found.append(record.failure.message)
        found += [f"More: {record.failure.see}"] if record.failure.see else []
    return tuple(found)


def parameters(trials: Sequence[Trial]) -> list[str]:
    """The names of all hyperparameters of these trials, in order of their appearance."""
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def header(names: Sequence[str], spec: SweepSpec) -> tuple[str, ...]:
    return ("TRIAL", "STATUS", *spec.metrics, "VALUES", "TIME", *(name.lstrip("-") for name in names))


def cells(trial: Trial, names: Sequence[str], spec: SweepSpec) -> tuple[str, ...]:
    """A trial's row under `header`. A hyperparameter that it does not have is a dash."""
    took = trial.duration_s
    return (
        str(trial.number),
        trial.shown,
        *map(value_text, values_of(trial, spec)),
        str(len(trial.curve)),
        duration_text(took) if took is not None else "-",
        *(value_text(trial.values.get(name)) for name in names),
    )


def _said(trial: Trial) -> str:
    values = ", ".join(f"{name.lstrip('-')} {value_text(value)}" for name, value in trial.values.items())
    return f" with {values}" if values else ""
