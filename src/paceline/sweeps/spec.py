"""The frozen description of a sweep, stored in its record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from paceline.errors import SweepError
from paceline.sweeps.points import ARGUMENTS, check_switches, check_way, way
from paceline.sweeps.policies.pausing import budget
from paceline.sweeps.policies.policies import policy_from_json
from paceline.sweeps.policies.policy import Policy
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Goal
from paceline.system.names import did_you_mean
from paceline.system.serialization import known_fields, plain_fields
from paceline.targets.base import ALIKE_SPAN

#: Engines that can run a sweep's controller.
CONTROLLERS = ("slurm", "ray")
#: Maximum number of trials of a sweep: the controller keeps the curves of all trials in memory.
MOST_TRIALS = 10_000


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """The specification of a sweep: its space, metrics, policy and limits.

    The sampler is checked by `samplers.check_sampler`, because programs that only read a sweep may lack its library.

    Attributes:
        metric: The primary metric.
        goal: "maximize" or "minimize".
        further: Other metrics, each with its goal. If there are any, the sweep searches for the Pareto front.
        trials: Number of trials in all.
        concurrent: Number of trials at a time.
        sampler: A name, or "module:function" in the sweep's source. The function makes an Optuna sampler from a seed.
        stop: The policy, or None.
        points: Points to try first, each as a dict of names to values.
        max_failures: Number of failed trials that ends the sweep; None for no limit.
        max_duration_seconds: Seconds from the sweep's start until the sweep must end; None for no limit.
        repeats: Whether a point of a finite space may be tried twice.
        pass_as: How the script gets the values: a form such as "arguments" (`points.WAYS`), or the name of a JSON file.
        switches: Arguments without a value, `--amp` or `--amp/--no-amp`: true gives the first word, false the second.
        array_size: Number of trials in one submitted job; None to submit each trial separately.
        warm_start: Ids of former sweeps whose results the sampler gets.
        resumed: Ids of former trials from which the first trials of this sweep resume, in the order of `points`.
        controller: "slurm" or "ray" if a job of this engine controls the sweep; None for a local process.
        counted_from: Number of the first trial that counts toward limits; above 0 if trials were added after the end.
        counted_utc: Time from which the sweep's limits count; None for the sweep's start.

    Raises:
        SweepError: A value is wrong.
    """

    space: Space
    metric: str
    goal: Goal = "maximize"
    further: tuple[tuple[str, Goal], ...] = ()
    trials: int = 20
    concurrent: int = 4
    sampler: str = "random"
    seed: int = 0
    stop: Policy | None = None
    points: tuple[Mapping[str, object], ...] = ()
    max_failures: int | None = None
    max_duration_seconds: float | None = None
    repeats: bool = False
    pass_as: str = ARGUMENTS
    switches: tuple[str, ...] = ()
    array_size: int | None = None
    warm_start: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    controller: str | None = None
    counted_from: int = 0
    counted_utc: str | None = None
    version: int = field(default=1)

    def __post_init__(self) -> None:
        for metric, goal in zip(self.metrics, self.goals, strict=True):
            if not isinstance(metric, str) or not metric:
                raise SweepError(
                    f"metric={metric!r} is not a name. Give that by which the script logs it, such as metric='accuracy'."
                )
            if goal not in get_args(Goal):
                raise SweepError(f"goal={goal!r}: write 'maximize' or 'minimize'.")
            if self.metrics.count(metric) > 1:
                raise SweepError(f"the metric {metric!r} is there twice.")
        # Refuse a class, for which isinstance(..., Policy) is true as well.
        if isinstance(self.stop, type):
            raise SweepError(f"stop={self.stop.__name__} is a class. Make a policy: stop=pl.{self.stop.__name__}(...).")
        if not isinstance(self.repeats, bool):
            raise SweepError(f"repeats={self.repeats!r}: write True or False.")
        if self.further and self.stop is not None:
            raise SweepError(
                f"stop={self.stop!r} with {len(self.metrics)} metrics: policies judge trials by one. Leave stop out, or give one "
                "metric."
            )
        _check_count("trials", self.trials, MOST_TRIALS)
        _check_count("concurrent", self.concurrent, MOST_TRIALS)
        if self.max_failures is not None:
            _check_count("max_failures", self.max_failures, MOST_TRIALS)
        if self.controller not in (None, *CONTROLLERS):
            raise SweepError(
                f"controller={self.controller!r}: write {' or '.join(map(repr, CONTROLLERS))}, the engine of the trials; "
                f"leave it out for this machine.{did_you_mean(str(self.controller), CONTROLLERS)}"
            )
        if self.array_size is not None:
            _check_count("array_size", self.array_size, ALIKE_SPAN)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise SweepError(f"seed={self.seed!r} is not an integer.")
        limit = self.max_duration_seconds
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise SweepError(f"max_duration_seconds={limit!r} is not a time above 0.")
        if self.stop is not None and not isinstance(self.stop, Policy):
            raise SweepError(
                f"stop={self.stop!r} is not a policy. Give Bandit, MedianStopping, TruncationSelection, ASHA, Hyperband or "
                "PopulationBasedTraining."
            )
        names = {name.lstrip("-") for name in self.space.names}
        if taken := [name for name in budget(self.stop) if name.lstrip("-") in names]:
            raise SweepError(
                f"budget={taken[0]!r} is a hyperparameter of the space as well: the policy says how long a trial lasts. "
                "Take it out of one of them."
            )
        if not all(isinstance(run_id, str) for run_id in self.warm_start):
            raise SweepError(f"warm_start={self.warm_start!r}: give sweeps, or their run ids.")
        object.__setattr__(self, "pass_as", way(self.pass_as))
        check_way(self.pass_as, self.space)
        check_switches(self.switches, self.pass_as, self.space)
        for point in self.points:
            if not isinstance(point, Mapping):
                raise SweepError(f"points: {point!r} is not a point. Give a list of mappings, as [{{'--lr': 0.01}}].")
            self.space.chosen(point)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics, the primary one first."""
        return (self.metric, *(name for name, _ in self.further))

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goal of each metric, in the order of `metrics`."""
        return (self.goal, *(goal for _, goal in self.further))

    def to_json(self) -> dict[str, object]:
        values = plain_fields(self)
        del values["further"]
        if self.further:
            values |= {"metric": list(self.metrics), "goal": list(self.goals)}
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SweepSpec:
        """Convert JSON from `to_json` to a spec. Ignore fields of newer versions."""
        values = known_fields(cls, data)
        values["space"] = Space.from_json(data["space"])
        values["stop"] = policy_from_json(data["stop"]) if data.get("stop") else None
        values |= {name: tuple(data.get(name) or ()) for name in ("points", "warm_start", "resumed", "switches")}
        return cls(**(values | objectives(data["metric"], data.get("goal", "maximize"))))


def objectives(metric: object, goal: object) -> dict[str, Any]:
    """Return the fields `metric`, `goal` and `further` of a spec as a dict.

    Raises:
        SweepError: The lists differ in length.
    """
    if not isinstance(metric, (list, tuple)):
        return {"metric": metric, "goal": goal}
    goals = [goal] if isinstance(goal, str) and len(metric) == 1 else goal
    if not metric or not isinstance(goals, (list, tuple)) or len(goals) != len(metric):
        raise SweepError(
            f"metric={list(metric)!r} with goal={goal!r}: give one goal for each metric, such as goal=['maximize', 'minimize']."
        )
    return {"metric": metric[0], "goal": goals[0], "further": tuple(zip(metric[1:], goals[1:], strict=True))}


def listed(name: str, given: object) -> tuple[Any, ...]:
    """Return a list's items, or a single string, as a tuple.

    Raises:
        SweepError: The value is neither a list nor a string.
    """
    if isinstance(given, (str, Mapping)):
        return (given,)
    if not isinstance(given, Iterable):
        raise SweepError(f"{name}={given!r} is not a list.")
    return tuple(given)


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SweepError(f"{name}={value!r} is not an integer from 1 to {most}.")
