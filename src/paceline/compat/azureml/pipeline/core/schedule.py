"""Schedules (`azureml.pipeline.core.schedule`): there is no service here that keeps them."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml.refused import Refused

__all__ = ["Schedule", "ScheduleRecurrence", "TimeZone"]


class ScheduleRecurrence:
    """How often: accepted, for what makes a schedule of it to refuse."""

    def __init__(self, frequency: str, interval: int, **others: Any) -> None:
        self.frequency, self.interval = frequency, interval
        vars(self).update(others)


class TimeZone:
    """Names of time zones: any."""

    def __class_getitem__(cls, name: str) -> str:
        return name


class Schedule(Refused):
    """Raises ScenarioNotSupportedException, as its `create` and `get` do."""

    refused = "Let cron, or a systemd timer, run the program that submits the pipeline."

    @classmethod
    def create(cls, *arguments: Any, **named: Any) -> Any:
        """Raise ScenarioNotSupportedException."""
        raise cls.refusal()

    get = create

    @classmethod
    def list(cls, *arguments: Any, **named: Any) -> Any:
        """None: there are no schedules."""
        return []

    get_all = get_schedules_for_pipeline_id = list
