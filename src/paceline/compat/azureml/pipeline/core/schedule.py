"""Schedules (`azureml.pipeline.core.schedule`): there is no service here that keeps them."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException

__all__ = ["Schedule", "ScheduleRecurrence", "TimeZone"]

_WHY = "there are no schedules here. Let cron, or a systemd timer, run the program that submits the pipeline."


class ScheduleRecurrence:
    """How often: accepted, for what makes a schedule of it to refuse."""

    def __init__(self, frequency: str, interval: int, **others: Any) -> None:
        self.frequency, self.interval = frequency, interval
        vars(self).update(others)


class TimeZone:
    """Names of time zones: any."""

    def __class_getitem__(cls, name: str) -> str:
        return name


class Schedule:
    """Raises ScenarioNotSupportedException, as its `create`, `get` and `list` do."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise ScenarioNotSupportedException(_WHY)

    @staticmethod
    def create(*arguments: Any, **named: Any) -> Any:
        """Raise ScenarioNotSupportedException."""
        raise ScenarioNotSupportedException(_WHY)

    get = get_all = get_schedules_for_pipeline_id = create

    @staticmethod
    def list(*arguments: Any, **named: Any) -> Any:
        """None: there are no schedules."""
        return []
