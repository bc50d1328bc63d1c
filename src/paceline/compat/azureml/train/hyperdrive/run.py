"""A sweep that was submitted (`azureml.train.hyperdrive.run`).

https://learn.microsoft.com/python/api/azureml-train-core/azureml.train.hyperdrive.hyperdriverun
"""

from __future__ import annotations

import json
from typing import Any

from paceline.compat.azureml.core.run import Run, ScriptRun
from paceline.compat.azureml.exceptions import HyperDriveRuntimeException, sdk_class
from paceline.compat.azureml.train.hyperdrive.runconfig import RESUMED, PrimaryMetricGoal
from paceline.runs import states
from paceline.runs.record import RunRecord
from paceline.sweeps import children
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial

__all__ = ["HyperDriveRun", "PrimaryMetricGoal"]


@sdk_class
class HyperDriveRun(Run):
    """The run that has trials; each is a child, `<id>_<number>`."""

    @classmethod
    def _handle(cls, experiment: Any, record: RunRecord) -> Any:
        return ScriptRun(experiment, record.run_id)

    @property
    def hyperdrive_config(self) -> Any:
        """What it tries, as Paceline keeps it."""
        return self._spec

    @property
    def tags(self) -> dict[str, str | None]:
        """Its tags, and under `_aml_system_<child id>` the parameters of each child, as JSON."""
        spec = self._spec
        known: dict[str, str | None] = {
            f"_aml_system_{child}": text for child, text in self.get_hyperparameters().items()
        }
        known["_aml_system_max_total_jobs"] = str(spec.trials)
        known["_aml_system_max_concurrent_jobs"] = str(spec.concurrent)
        return {**super().tags, **known}

    def get_hyperparameters(self) -> dict[str, str]:
        """Child's id -> its parameters, as JSON."""
        return {trial.run_id: json.dumps(dict(trial.values)) for trial in self._trials()}

    def get_metrics(self, name: str | None = None, *others: Any, **named: Any) -> dict[str, Any]:
        """Child's id -> its metrics."""
        return {child.id: child.get_metrics(name) for child in self.get_children()}

    def get_best_run_by_primary_metric(
        self, include_failed: bool = True, include_canceled: bool = True, include_resume_from_runs: bool = True
    ) -> Any:
        """The child whose primary metric has been the best at any time; None where none has logged it."""
        left_out: set[str] = set()
        if not include_failed:
            left_out.add(states.FAILED)
        if not include_canceled:
            left_out.add(states.CANCELED)
        trials = self._trials()
        if include_resume_from_runs:
            for former in filter(None, (self.properties.get(RESUMED) or "").split(",")):
                trials += HyperDriveRun(self.experiment, former)._trials()
        found = [one for one in self._sorted(trials) if one.status not in left_out and self._best(one) is not None]
        return ScriptRun(self.experiment, found[0].run_id) if found else None

    def get_children_sorted_by_primary_metric(
        self, top: int = 0, reverse: bool = False, discard_no_metric: bool = False
    ) -> list[dict[str, Any]]:
        """The children, the best first, as run_id, hyperparameters (JSON), best_primary_metric and status.

        Those without the metric come last. top: so many alone; 0 for all. reverse: the worst first.
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

    def fail(self, error_details: object = None, error_code: str | None = None, **others: Any) -> None:
        """Raise HyperDriveRuntimeException: a sweep ends with its trials; `cancel` ends them."""
        raise HyperDriveRuntimeException("fail is not supported for HyperDrive runs. cancel() ends its trials.")

    def get_diagnostics(self) -> Any:
        """Raise HyperDriveRuntimeException: look at `logs/driver.log`."""
        raise HyperDriveRuntimeException("there are no diagnostics. The sweep's log is logs/driver.log: paceline logs.")

    @property
    def _spec(self) -> SweepSpec:
        return SweepSpec.from_json(self.record().sweep or {})

    def _trials(self) -> list[Trial]:
        return children.trials(self.folder, self._spec)

    def _best(self, trial: Trial) -> float | None:
        return trial.best(self._spec.goal)

    def _sorted(self, trials: list[Trial]) -> list[Trial]:
        sign = -1 if self._spec.goal == "maximize" else 1

        def key(trial: Trial) -> tuple[bool, float]:
            best = self._best(trial)
            return (best is None, sign * best if best is not None else 0.0)

        return sorted(trials, key=key)
