"""A schedule: its times, its events and its job."""

from __future__ import annotations

import datetime as dt
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import ScheduleError
from paceline.runs.record import parse_utc, user_name
from paceline.schedules import times
from paceline.schedules.occurrences import HAND, TIME, Occurrence, Occurrences
from paceline.system.names import name_rule

NAME = name_rule("_-", 80)
QUEUE, SKIP = OVERLAPS = ("queue", "skip")
ONCE, _ = MISSED_RULES = ("once", "skip")
#: The tag that names the schedule of a run.
TAG = "schedule"
COMPLETED, FAILED, ANY = ENDS = ("completed", "failed", "any")
#: Maximum length of an event's name in a key: the end of an id is unique, and a temporary file's name has at most 255 bytes.
_LONGEST = 210
_RUN_KEY = re.compile(r"[^A-Za-z0-9_. -]")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A job file or template, with the times and events that start it.

    Attributes:
        cron: Five fields of a cron expression, or None.
        time_zone: Time zone of `cron`, such as "Europe/Berlin".
        on_dataset, on_model: Names of datasets and models whose new versions start a run.
        after: Experiments and ids of runs. The schedule starts a run when such a run, or a run of such an experiment, ends.
        ended: How a run of `after` must have ended: "completed", "failed" or "any".
        file: The job file, read at each start, or None.
        template: The template, read at each start, or None.
        parameters: Values of the file's parameters.
        arguments: Arguments of the script that replace the file's arguments, or None.
        overlap: While a run of the schedule is active, "queue" lets the next run wait, and "skip" does not start it.
        missed: For times at which the timer was off, "once" starts one run for all of them, and "skip" starts none.
        is_paused: Whether the schedule starts no runs until it is resumed.
    """

    name: str
    cron: str | None = None
    time_zone: str | None = None
    on_dataset: tuple[str, ...] = ()
    on_model: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ended: str = COMPLETED
    file: str | None = None
    template: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    overlap: str = QUEUE
    missed: str = ONCE
    user: str = field(default_factory=user_name)
    created_utc: str = ""
    is_paused: bool = False
    search_path: str = ""
    #: "model:digits" or "dataset:mnist" -> its latest version at the time when the schedule was added.
    versions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ScheduleError(
                f"the schedule's name {self.name!r} must begin with a letter or digit and have only letters, digits, '_' "
                "and '-', at most 80 characters."
            )
        if not (self.cron or self.on_dataset or self.on_model or self.after):
            raise ScheduleError(
                "say when: a cron expression such as '0 3 * * *', or --on-dataset, --on-model or --after with a name."
            )
        if (self.file is None) == (self.template is None):
            raise ScheduleError("name one job: a job file (job.yaml), or --template NAME.")
        for option, value, known in (
            ("--overlap", self.overlap, OVERLAPS),
            ("--missed", self.missed, MISSED_RULES),
            ("--ended", self.ended, ENDS),
        ):
            if value not in known:
                raise ScheduleError(f"{option} {value!r} must be one of {', '.join(known)}.")

    @property
    def when(self) -> str:
        """The times and events as a text, such as "0 3 * * * (Europe/Berlin)"."""
        parts = [f"{self.cron} ({self.time_zone})"] if self.cron else []
        parts += [f"dataset {name}" for name in self.on_dataset] + [f"model {name}" for name in self.on_model]
        how = f" ({self.ended})" * (self.ended != COMPLETED)
        return ", ".join([*parts, *(f"after {name}{how}" for name in self.after)])

    @property
    def job(self) -> str:
        """The job file or template with parameters and arguments, as a command line."""
        words = [
            *filter(None, (self.file, self.template and "--template", self.template)),
            *(f"{key}={value}" for key, value in self.parameters.items()),
        ]
        return shlex.join([*words, *(["--", *self.arguments] if self.arguments is not None else [])])

    def next_time(self, now: dt.datetime) -> dt.datetime | None:
        """Return the next time in UTC; None if the schedule is paused or has no times."""
        return times.next_time(self.cron, self.time_zone or "UTC", now) if self.cron and not self.is_paused else None


def since(schedule: Schedule, occurrences: Occurrences) -> dt.datetime:
    """Return the schedule's last handled due time, or the time of its creation."""
    keys = occurrences.keys(TIME)
    return max([parse_utc(schedule.created_utc), *(_time_of(key) for key in keys)])


def time_occurrence(due: times.Due, now: dt.datetime, *, late_s: float) -> Occurrence:
    """Return an occurrence for the latest due time; after `late_s` seconds it is late."""
    earlier = [one.isoformat() for one in due.earlier or ()]
    return Occurrence(
        key=f"{TIME}-{due.last:%Y%m%dT%H%M%SZ}",
        kind=TIME,
        what=due.last.isoformat(),
        time_utc=now.isoformat(),
        is_late=(now - due.last).total_seconds() > late_s,
        missed_count=due.count,
        missed_first=earlier[0] if earlier else None,
        missed_last=earlier[1] if earlier else None,
    )


def named_occurrence(kind: str, what: str, now: dt.datetime) -> Occurrence:
    """Return an occurrence for a new version, an ended run, or a start by hand."""
    text = now.strftime("%Y%m%dT%H%M%S.%fZ") if kind == HAND else what.replace(":", "-")
    return Occurrence(
        key=f"{kind}-{_RUN_KEY.sub('_', text[-_LONGEST:])}", kind=kind, what=what, time_utc=now.isoformat()
    )


def _time_of(key: str) -> dt.datetime:
    return dt.datetime.strptime(f"{key.partition('-')[2]}+0000", "%Y%m%dT%H%M%SZ%z")
