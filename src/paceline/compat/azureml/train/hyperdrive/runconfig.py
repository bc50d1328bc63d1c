"""Sweep configurations (`azureml.train.hyperdrive.runconfig`).

https://learn.microsoft.com/python/api/azureml-train-core/azureml.train.hyperdrive.hyperdriveconfig
"""

from __future__ import annotations

import copy
import enum
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from paceline.compat.azureml._restclient.constants import RunStatus
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.exceptions import HyperDriveConfigException
from paceline.compat.azureml.records import late
from paceline.compat.azureml.train.estimator import MMLBaseEstimator
from paceline.compat.azureml.train.hyperdrive.search import EarlyTerminationPolicy, HyperParameterSampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    import paceline
    from paceline import Workspace
    from paceline.compat.azureml.core.run import Run
    from paceline.compat.azureml.submission import Prepared
    from paceline.sweeps import SweepSpec

__all__ = ["HyperDriveConfig", "HyperDriveRunConfig", "PrimaryMetricGoal"]


#: Maximum number of earlier sweeps in the argument `resume_from`.
_MOST_FORMER = 5
#: Stands for the id of the trial in the paths of outputs.
OF_TRIAL = "{run}"
#: Property of a run. Lists the earlier sweeps that the run's sweep continues.
RESUMED = "azureml.hyperdrive.resume_from"


class PrimaryMetricGoal(enum.Enum):
    """Whether a sweep maximizes or minimizes its primary metric."""

    MAXIMIZE = "MAXIMIZE"
    MINIMIZE = "MINIMIZE"

    @staticmethod
    def from_str(goal: str) -> PrimaryMetricGoal:
        """Return the goal of this name, ignoring case.

        Raises:
            ValueError: The name is unknown.
        """
        return PrimaryMetricGoal(str(goal).upper())


class HyperDriveConfig:
    """A sweep: search space, goal, limits and trials.

    Each trial runs `estimator` or `run_config` (a ScriptRunConfig). Exactly one of these two arguments must be present.

    Args:
        max_concurrent_runs: Trials that run at a time; default: the total number of trials.
        max_duration_minutes: Time limit of the sweep; default: a week.
        policy: Early termination policy; default: none.
        resume_from: At most 5 earlier HyperDriveRuns, whose results the sampler uses from the start.
        resume_child_runs: Ended trials of earlier sweeps. Each of these trials runs again with the same parameters, and
            receives its earlier outputs by the option `--resume-from`.
        custom_run_id: Id of the sweep's run.

    Raises:
        HyperDriveConfigException: A value is wrong.
    """

    def __init__(
        self,
        hyperparameter_sampling: HyperParameterSampling,
        primary_metric_name: str,
        primary_metric_goal: PrimaryMetricGoal,
        max_total_runs: int,
        max_concurrent_runs: int | None = None,
        max_duration_minutes: int = 10080,
        policy: EarlyTerminationPolicy | None = None,
        estimator: MMLBaseEstimator | None = None,
        run_config: ScriptRunConfig | None = None,
        resume_from: object = None,
        resume_child_runs: object = None,
        pipeline: object = None,
        debug_flag: object = None,
        custom_run_id: str | None = None,
    ) -> None:
        given = [
            name
            for name, value in (("estimator", estimator), ("run_config", run_config), ("pipeline", pipeline))
            if value
        ]
        if len(given) != 1:
            raise HyperDriveConfigException(
                f"exactly one of estimator, run_config and pipeline must be present, got: {', '.join(given) or 'none'}."
            )
        if pipeline is not None:
            raise HyperDriveConfigException(
                "a sweep over pipelines is not supported. Sweep over the step's script: run_config=."
            )
        if run_config is not None and not isinstance(run_config, ScriptRunConfig):
            raise HyperDriveConfigException(f"run_config={run_config!r} must be a ScriptRunConfig.")
        if estimator is not None and not isinstance(estimator, MMLBaseEstimator):
            raise HyperDriveConfigException(f"estimator={estimator!r} must be an estimator.")
        if not isinstance(hyperparameter_sampling, HyperParameterSampling):
            raise HyperDriveConfigException(f"hyperparameter_sampling={hyperparameter_sampling!r} must be a sampling.")
        if policy is not None and not isinstance(policy, EarlyTerminationPolicy):
            raise HyperDriveConfigException(f"policy={policy!r} must be a policy.")
        self.hyperparameter_sampling = hyperparameter_sampling
        self.primary_metric_name = primary_metric_name
        goal = primary_metric_goal
        self.primary_metric_goal = goal if isinstance(goal, PrimaryMetricGoal) else _goal(goal)
        self.max_total_runs = _count("max_total_runs", max_total_runs)
        self.max_concurrent_runs = (
            self.max_total_runs if max_concurrent_runs is None else _count("max_concurrent_runs", max_concurrent_runs)
        )
        self.max_duration_minutes = _count("max_duration_minutes", max_duration_minutes)
        self.policy = policy
        self.estimator, self.run_config = estimator, run_config
        self.custom_run_id = custom_run_id
        self.resume_from = _runs("resume_from", resume_from)
        if len(self.resume_from) > _MOST_FORMER:
            raise HyperDriveConfigException(
                f"resume_from has {len(self.resume_from)} runs; the limit is {_MOST_FORMER}."
            )
        self.resume_child_runs = _runs("resume_child_runs", resume_child_runs)

    @property
    def source_directory(self) -> str:
        return (self.estimator or self.run_config).source_directory  # type: ignore[union-attr]

    def _submit_to(
        self,
        experiment: paceline.Experiment,
        tags: Mapping[str, object] | None,
        *,
        display_name: str | None = None,
        run_id: str | None = None,
        **others: object,
    ) -> Run:
        from paceline.submit import SourceCopy
        from paceline.sweeps import submit_sweep

        if others:
            raise HyperDriveConfigException(f"submit can't take {', '.join(sorted(others))} with a HyperDriveConfig.")
        found, spec = self.prepared(experiment.workspace)
        folder = submit_sweep(
            found.job,
            spec,
            SourceCopy(directory=found.source_directory.absolute()),
            experiment.workspace.path,
            experiment.name,
            tags=tags,
            display_name=display_name,
            warnings=found.notes,
            run_id=run_id or self.custom_run_id,
        )
        run: Run = late("train.hyperdrive.run", "HyperDriveRun")(experiment, folder.run_id)
        run._said = found.said
        if self.resume_from:
            run.add_properties({RESUMED: ",".join(former.id for former in self.resume_from)})
        return run

    def prepared(
        self, workspace: Workspace, change: Callable[[ScriptRunConfig], ScriptRunConfig] = lambda config: config
    ) -> tuple[Prepared, SweepSpec]:
        """Return the job of the sweep's trials, and the sweep's settings.

        `change` is first applied to the script's configuration: a pipeline step thus sets its parameters.
        """
        from paceline.compat.azureml.submission import prepared
        from paceline.sweeps import Space, SweepSpec, check_sampler

        swept = {name.lstrip("-") for name in self.hyperparameter_sampling.parameter_space}
        config = self.run_config
        if self.estimator is not None:
            estimator = copy.copy(self.estimator)
            # If a fixed value has the same name as a hyperparameter, use the hyperparameter.
            mine = {k: v for k, v in estimator.script_params.items() if str(k).lstrip("-") not in swept}
            estimator.script_params = mine
            config = estimator.script_run_config(workspace)
        assert config is not None, "one of the two was given"
        found = prepared(change(config), workspace, run_id=OF_TRIAL)
        space = Space(self.hyperparameter_sampling.parameter_space)
        sampler = self.hyperparameter_sampling.sampler
        check_sampler(sampler, space)
        former = tuple(self._former(run).id for run in self.resume_from)
        points = tuple(_point(run) for run in self.resume_child_runs)
        spec = SweepSpec(
            space=space,
            metric=self.primary_metric_name,
            goal=self._native_goal,
            trials=self.max_total_runs,
            concurrent=self.max_concurrent_runs,
            sampler=sampler,
            seed=secrets.randbelow(1 << 31),
            stop=self.policy.policy if self.policy else None,
            max_duration_seconds=self.max_duration_minutes * 60.0,
            points=points,
            resumed=tuple(run.id for run in self.resume_child_runs),
            # Random and grid samplers don't learn from earlier results, which only count when the best run is chosen.
            warm_start=former if sampler == "tpe" else (),
        )
        return found, spec

    @property
    def _native_goal(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.primary_metric_goal is PrimaryMetricGoal.MAXIMIZE else "minimize"

    def _former(self, run: Run) -> Run:
        """Return `run`. Raise unless it is an ended sweep with the same goal as this sweep."""
        record = run.record()
        spec = record.sweep or {}
        if record.status not in (RunStatus.COMPLETED, RunStatus.CANCELED) or not spec:
            raise HyperDriveConfigException(
                f"resume_from: run {run.id} is {record.status}, of kind {record.kind}; it must be a HyperDriveRun that is "
                "Completed or Canceled."
            )
        if (spec["metric"], spec["goal"]) != (self.primary_metric_name, self._native_goal):
            raise HyperDriveConfigException(
                f"resume_from: run {run.id} optimized {spec['metric']!r}, {spec['goal']}; this sweep optimizes "
                f"{self.primary_metric_name!r}, {self._native_goal}."
            )
        return run


class HyperDriveRunConfig(HyperDriveConfig):
    """A HyperDriveConfig with an estimator, by its former class name (before SDK 1.0)."""

    def __init__(
        self,
        estimator: MMLBaseEstimator,
        hyperparameter_sampling: HyperParameterSampling,
        primary_metric_name: str,
        primary_metric_goal: PrimaryMetricGoal,
        max_total_runs: int,
        max_concurrent_runs: int | None = None,
        max_duration_minutes: int = 10080,
        policy: EarlyTerminationPolicy | None = None,
    ) -> None:
        super().__init__(
            hyperparameter_sampling,
            primary_metric_name,
            primary_metric_goal,
            max_total_runs,
            max_concurrent_runs,
            max_duration_minutes,
            policy,
            estimator,
        )


def _runs(name: str, given: Any) -> list[Run]:
    runs: list[Run] = [] if given is None else [*given] if isinstance(given, (list, tuple)) else [given]
    if wrong := [run for run in runs if not hasattr(run, "record")]:
        raise HyperDriveConfigException(f"{name} has {wrong[0]!r}, which is not a run.")
    return runs


def _point(run: Run) -> dict[str, object]:
    """Return the hyperparameters of a trial. Raise unless the trial has ended."""
    record = run.record()
    if record.trial is None or not record.is_terminal:
        raise HyperDriveConfigException(
            f"resume_child_runs: run {run.id} is {record.status}, of kind {record.kind}; it must be an ended child of a "
            "HyperDriveRun."
        )
    return dict(record.trial["values"])


def _goal(goal: object) -> PrimaryMetricGoal:
    try:
        return PrimaryMetricGoal.from_str(str(goal))
    except ValueError:
        raise HyperDriveConfigException(
            f"primary_metric_goal={goal!r} must be PrimaryMetricGoal.MAXIMIZE or PrimaryMetricGoal.MINIMIZE."
        ) from None


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HyperDriveConfigException(f"{name}={value!r} must be a number of 1 or more.")
    return value
