"""Schedules (`azureml.pipeline.core.schedule`): refused, as no service runs them."""

from __future__ import annotations

import builtins
from typing import NoReturn

from paceline.compat.azureml.refused import Refused

__all__ = ["Schedule", "ScheduleRecurrence", "TimeZone"]


class ScheduleRecurrence:
    """The frequency of a schedule: accepted; creating the schedule raises the error."""

    def __init__(self, frequency: str, interval: int, **others: object) -> None:
        self.frequency, self.interval = frequency, interval
        vars(self).update(others)


class TimeZone:
    """Any names of time zones."""

    def __class_getitem__(cls, name: str) -> str:
        return name


class Schedule(Refused):
    """A schedule: raises ScenarioNotSupportedException, as `create` and `get` do."""

    refused = "Let cron, or a systemd timer, run the program that submits the pipeline."

    @classmethod
    def create(cls, *arguments: object, **named: object) -> NoReturn:
        """Raise ScenarioNotSupportedException."""
        raise cls.refusal()

    get = create

    @classmethod
    def list(cls, *arguments: object, **named: object) -> builtins.list[NoReturn]:
        """Return an empty list."""
        return []

    get_all = get_schedules_for_pipeline_id = list
