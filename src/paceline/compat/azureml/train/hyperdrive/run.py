"""Submitted sweeps (`azureml.train.hyperdrive.run`).

https://learn.microsoft.com/python/api/azureml-train-core/azureml.train.hyperdrive.hyperdriverun
"""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import TYPE_CHECKING, NoReturn

from paceline.compat.azureml._restclient.constants import RunStatus
from paceline.compat.azureml.core.run import Run, ScriptRun
from paceline.compat.azureml.exceptions import HyperDriveRuntimeException, sdk_class
from paceline.compat.azureml.train.hyperdrive.runconfig import RESUMED, PrimaryMetricGoal
from paceline.runs import RunRecord
from paceline.sweeps import SweepSpec, Trial, cost, is_better, trials

if TYPE_CHECKING:
    from paceline.runs import ExperimentLike
    from paceline.sweeps import Policy

__all__ = ["HyperDriveRun", "PrimaryMetricGoal"]

#: Name of the metric of a sweep's run in the SDK. The metric's value describes the best child run.
BEST_CHILD = "best_child_by_primary_metric"
#: Name of a sampler in Paceline -> its name in the SDK.
_SAMPLERS = {"random": "RANDOM", "grid": "GRID", "tpe": "BAYESIANOPTIMIZATION"}


@sdk_class
class HyperDriveRun(Run):
    """A sweep. Each trial is a child run with the id `<sweep's id>_<number>`."""

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> ScriptRun:
        return ScriptRun(experiment, record.run_id)

    @property
    def hyperdrive_config(self) -> SweepSpec:
        """The sweep's configuration, in Paceline's form."""
        return self._spec

    @property
    def tags(self) -> dict[str, str | None]:
        """The tags, plus each child's parameters as `_aml_system_<child id>` (JSON)."""
        spec = self._spec
        known: dict[str, str | None] = {
            f"_aml_system_{child}": text for child, text in self.get_hyperparameters().items()
        }
        parts = {
            "generator_config": {
                "name": _SAMPLERS.get(spec.sampler, spec.sampler),
                "parameter_space": spec.space.to_json(),
            },
            "policy_config": _policy(spec.stop),
            "primary_metric_config": {"name": spec.metric, "goal": spec.goal},
            "max_total_jobs": spec.trials,
            "max_concurrent_jobs": spec.concurrent,
            "max_duration_minutes": int((spec.max_duration_seconds or 0) / 60),
        }
        # Set each tag under two names, because programs recognize a sweep by either name.
        for name, value in parts.items():
            known[name] = known[f"_aml_system_{name}"] = json.dumps(value)
        return {**super().tags, **known}

    def get_hyperparameters(self) -> dict[str, str]:
        """Return each child's parameters as JSON, by child id."""
        return {trial.run_id: json.dumps(dict(trial.values)) for trial in self._trials()}

    def get_metrics(self, name: str | None = None, *others: object, **named: object) -> dict[str, object]:
        """Return each child's metrics, by child id.

        For "best_child_by_primary_metric", return `best_child_metric` instead. `others` and `named` have no effect.
        """
        if name == BEST_CHILD:
            return best_child_metric(self, name)
        return {child.id: child.get_metrics(name) for child in self.get_children()}

    def get_best_run_by_primary_metric(
        self, include_failed: bool = True, include_canceled: bool = True, include_resume_from_runs: bool = True
    ) -> ScriptRun | None:
        """Return the child with the best primary metric so far, or None without metrics."""
        counts = {RunStatus.FAILED: include_failed, RunStatus.CANCELED: include_canceled}
        trials = self._trials()
        if include_resume_from_runs:
            for former in filter(None, (self.properties.get(RESUMED) or "").split(",")):
                trials += HyperDriveRun(self.experiment, former)._trials()
        found = [one for one in self._sorted(trials) if counts.get(one.status, True) and self._best(one) is not None]
        return ScriptRun(self.experiment, found[0].run_id) if found else None

    def get_children_sorted_by_primary_metric(
        self, top: int = 0, reverse: bool = False, discard_no_metric: bool = False
    ) -> list[dict[str, object]]:
        """Return the children, best first.

        Each child is a dict of run_id, hyperparameters (JSON), best_primary_metric and status. `top` is the number of
        children to return, or 0 for all. `reverse` puts the worst first. Children without the metric stay last.
        """
        trials = self._sorted(self._trials())
        with_metric = [trial for trial in trials if self._best(trial) is not None]
        without = [trial for trial in trials if self._best(trial) is None]
        listed = (with_metric[::-1] if reverse else with_metric) + ([] if discard_no_metric else without)
        return [
            {
                "run_id": trial.run_id,
                "hyperparameters": json.dumps(dict(trial.values)),
                "best_primary_metric": self._best(trial),
                "status": trial.status,
            }
            for trial in (listed[:top] if top else listed)
        ]

    def fail(self, error_details: object = None, error_code: str | None = None, **others: object) -> None:
        """Raise HyperDriveRuntimeException: use `cancel` to end a sweep and its trials."""
        raise HyperDriveRuntimeException("fail is not supported for HyperDrive runs. cancel() ends its trials.")

    def get_diagnostics(self) -> NoReturn:
        """Always raise HyperDriveRuntimeException. Read the sweep's `logs/driver.log`."""
        raise HyperDriveRuntimeException("there are no diagnostics. The sweep's log is logs/driver.log: paceline logs.")

    @property
    def _spec(self) -> SweepSpec:
        return SweepSpec.from_json(self.record().sweep or {})

    def _trials(self) -> list[Trial]:
        return trials(self.folder, self._spec)

    def _best(self, trial: Trial) -> float | None:
        return trial.best(self._spec.goal)

    def _sorted(self, trials: list[Trial]) -> list[Trial]:
        goal = self._spec.goal
        return sorted(trials, key=lambda trial: cost(trial.best(goal), goal))


def best_child_metric(run: Run, name: str | None = None) -> dict[str, object]:
    """Return `best_child_by_primary_metric`: a row for each new best value.

    The columns are metric_name, timestamp (UTC), run_id, metric_value and final. `final` is true in the last row after
    the sweep's end. For any other `name` than None and "best_child_by_primary_metric", return {}.
    """
    record = run.record()
    if name not in (None, BEST_CHILD) or record.sweep is None:
        return {}
    spec = SweepSpec.from_json(record.sweep)
    logged = sorted(
        (time, value, trial.run_id)
        for trial in trials(run.folder, spec)
        for _, value, time in Run(run.experiment, trial.run_id).metrics(spec.metric)
        if isinstance(value, (int, float)) and math.isfinite(value)
    )
    rows: list[tuple[float, float, str]] = []
    for row in logged:
        if not rows or is_better(row[1], rows[-1][1], spec.goal):
            rows.append(row)
    if not rows:
        return {}
    table: dict[str, list[object]] = {
        "metric_name": [spec.metric] * len(rows),
        # A tracker's time may be of another unit: keep it within years that `datetime` has.
        "timestamp": [
            dt.datetime.fromtimestamp(min(max(0.0, time), 253_402_300_799.0), dt.timezone.utc).isoformat()
            for time, _, _ in rows
        ],
        "run_id": [child for _, _, child in rows],
        "metric_value": [value for _, value, _ in rows],
        "final": [record.is_terminal and number == len(rows) for number in range(1, len(rows) + 1)],
    }
    # As in the SDK, if a metric is a table with a single row, return plain values instead of lists.
    return {BEST_CHILD: {key: column[0] if len(rows) == 1 else column for key, column in table.items()}}


def _policy(stop: Policy | None) -> dict[str, object]:
    if stop is None:
        return {"name": "DEFAULT"}
    # Paceline's classes of policies have the same names as the SDK's classes.
    return {"name": type(stop).__name__, "properties": stop.to_json()}
