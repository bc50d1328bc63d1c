"""What came of a sweep: its trials in order, the best of them, and the table in its outputs."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Sequence
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial, ranked
from paceline.system.files import write_whole

#: In the sweep's folder while more trials are asked for than it was made with.
MORE = "more.json"
#: In the sweep's outputs.
TABLE = "trials.csv"


def best_trial(trials: Sequence[Trial], spec: SweepSpec) -> Trial | None:
    """The trial with the best value of the primary metric at any time; None where none has one."""
    order = ranked(trials, spec.goal)
    return order[0] if order and order[0].best(spec.goal) is not None else None


def rows(trials: Sequence[Trial], spec: SweepSpec) -> list[dict[str, Any]]:
    """A mapping for each trial: trial, run_id, status, the metric's best value, how many it has, and each hyperparameter."""
    return [
        {
            "trial": trial.number,
            "run_id": trial.run_id,
            "status": trial.status,
            spec.metric: trial.best(spec.goal),
            "intervals": len(trial.curve),
            **{name.lstrip("-"): value for name, value in trial.values.items()},
        }
        for trial in trials
    ]


def write_table(folder: RunFolder, spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Write `outputs/trials.csv`. A full disk is no reason for a sweep to fail."""
    table = rows(trials, spec)
    # Branches of a choice bring names of their own, so the trials' rows differ; the columns are all of them in order of
    # appearance.
    columns = list(dict.fromkeys(name for row in table for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(table)
    with contextlib.suppress(OSError):
        write_whole(folder.outputs / TABLE, text.getvalue())
