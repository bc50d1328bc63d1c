"""schedule add, list, show, run, pause, resume, remove, tick: start runs at times, on new versions and after other runs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.common import age, print_fields, print_json, print_list, print_table, warn
from paceline.cli.options import JSON, VerbOption, takes
from paceline.cli.run_options import values_and_arguments
from paceline.errors import ScheduleError
from paceline.runs.record import utc_at
from paceline.runs.visible import visible
from paceline.schedules import tick as ticking
from paceline.schedules import timer, times
from paceline.schedules.occurrences import HAND, MISSED, STARTED, TIME, WAITING, Occurrence
from paceline.schedules.schedule import Schedule
from paceline.schedules.schedules import Schedules
from paceline.schedules.start import start
from paceline.system.files import age_s
from paceline.system.names import counted
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import MissedTimes, OccurrenceRow, ScheduleDetails, ScheduleRow

NAME = VerbOption("name", "The schedule.", complete="schedules", needed=True)
#: `schedule list` prints a warning if the timer has not called `schedule tick` for this many seconds.
_SILENT_S = 300.0
_SHOWN = 20


@takes(
    VerbOption(
        "words",
        "A cron expression as one word, such as '0 3 * * *'; the file of a job, a sweep or a pipeline (.yaml); values of its "
        "parameters, as lr=0.1; behind `--` the script's arguments.",
        "[CRON] [FILE.yaml] [NAME=VALUE]...",
        list,
    ),
    VerbOption("--name", "Name of the schedule; default: that of the file or template.", "NAME"),
    VerbOption(
        "--template", "Run this template in place of a job file.", "NAME", complete="templates", section="What runs"
    ),
    VerbOption(
        "--on-dataset", "Run on each new version of a dataset; may be repeated.", "DATASET", list, section="When"
    ),
    VerbOption(
        "--on-model", "Run on each new version of a model; may be repeated.", "MODEL", list, complete="model_names"
    ),
    VerbOption(
        "--after",
        "Run after each run of an experiment, or after one run, has ended; may be repeated.",
        "EXPERIMENT|RUN",
        list,
        complete="experiments",
    ),
    VerbOption("--ended", "With --after: how the run has ended: completed, failed or any. Default: completed.", "HOW"),
    VerbOption("--time-zone", "Time zone of the cron expression; default: this machine's.", "ZONE"),
    VerbOption(
        "--overlap",
        "While a run of the schedule goes on: queue lets the next one wait, skip does not start it. Default: queue.",
        "RULE",
        section="In which case",
    ),
    VerbOption(
        "--missed",
        "After times at which the machine was off: once starts one run for all of them, skip none. Default: once.",
        "RULE",
    ),
    VerbOption(
        "--timer",
        "What looks at the schedules each minute: systemd, cron, or none for a program of yours. Default: auto.",
        "KIND",
    ),
    JSON,
)
def add(**given: Any) -> None:
    """Start jobs, sweeps or pipelines of a file at times or after events."""
    rest, template = list(given.pop("words") or ()), given.pop("template")
    as_json = given.pop("as_json")
    cron = rest.pop(0) if rest and times.is_expression(rest[0]) else None
    file = None
    if template is None:
        if not rest or Path(rest[0]).suffix not in (".yaml", ".yml"):
            got = f", got {rest[0]!r}" if rest else ""
            raise ScheduleError(
                f"name a job file that ends with .yaml{got}, or --template NAME: paceline schedule add '0 3 * * *' job.yaml. "
                "A cron expression is one word, so put it in quotes."
            )
        file = os.path.abspath(rest.pop(0))
    parameters, arguments = values_and_arguments(file or f"--template {template}", rest)
    workspace = Workspace.from_config()
    schedules = workspace.schedules
    schedule = schedules.add(
        cron,
        file,
        template=template,
        parameters=parameters,
        arguments=arguments or None,
        **{name: value for name, value in given.items() if value},
    )
    if as_json:
        print_json(_row(schedules, schedule))
    else:
        _print_added(schedule, workspace.path)


def _print_added(schedule: Schedule, workspace_dir: Path) -> None:
    kind = timer.installed(workspace_dir) or timer.NONE
    print(f"Schedule {schedule.name}: {visible(schedule.when)} runs {visible(schedule.job)}")
    if (time := schedule.next_time(_now())) is not None:
        print(f"Next:      {_local(time, schedule)}")
    print(f"Timer:     {kind}. `paceline schedule show {schedule.name}` says what it has started.")
    if hint := timer.advice(kind):
        warn(f"paceline: {hint}")


@takes()
def tick() -> int:
    """Start due runs. A timer calls this each minute."""
    workspace_dir = Workspace.from_config(create=False).path
    problems = ticking.tick(workspace_dir, start(workspace_dir))
    for text in problems:
        print(f"paceline: {visible(text, lines=True)}", file=sys.stderr)
    return int(bool(problems))


@takes(NAME, JSON)
def run(*, name: str, as_json: bool) -> None:
    """Start a run of a schedule now, also while it is paused."""
    workspace = Workspace.from_config(create=False)
    done = ticking.start_now(workspace.schedules, name, start(workspace.path))
    if as_json:
        print_json(_occurrence(done))
        return
    print(done.run_id)
    print(f"Follow it:  paceline logs -f {done.run_id}", file=sys.stderr)


@takes(JSON)
def list_schedules(*, as_json: bool) -> None:
    """List the schedules with their next times and last runs."""
    schedules = Workspace.from_config(create=False).schedules
    print_list(
        [_row(schedules, one) for one in schedules.values()],
        {
            "SCHEDULE": lambda row: row["name"],
            "WHEN": lambda row: row["when"],
            "NEXT": lambda row: (
                _local(dt.datetime.fromisoformat(row["next_utc"]), schedules[row["name"]]) if row["next_utc"] else "-"
            ),
            "LAST": lambda row: age(row["last"]["time_utc"]) if row["last"] else "-",
            "RUN": lambda row: (row["last"]["run_id"] if row["last"] else None) or "-",
            "STATE": lambda row: row["state"],
        },
        as_json=as_json,
        to_json=lambda row: row,
        none="There is no schedule. `paceline schedule add '0 3 * * *' job.yaml` makes one.",
    )
    if len(schedules):
        _warn_of_silence(schedules)


def _warn_of_silence(schedules: Schedules) -> None:
    """Warn if no timer has checked the schedules for minutes."""
    if not (own := [one for name, one in schedules.items() if schedules.is_own(name)]):
        return
    try:
        kind = timer.installed(schedules.workspace_dir)
    except ScheduleError:
        kind = None
    path = schedules.tick_path
    newest = max(dt.datetime.fromisoformat(one.created_utc.replace("Z", "+00:00")) for one in own)
    is_new = (_now() - newest).total_seconds() < _SILENT_S
    if is_new or (path.exists() and age_s(path) < _SILENT_S):
        return
    since = f"since {utc_at(path.stat().st_mtime)}" if path.exists() else "yet"
    what = {"systemd": "See `systemctl --user list-timers`.", "cron": "Is cron running on this machine?"}
    text = what.get(
        kind or "", "This machine has no timer for them: add a schedule here, or call `paceline schedule tick`."
    )
    warn(f"paceline: no timer has looked at these schedules {since}. {text}")


@takes(NAME, JSON)
def show(*, name: str, as_json: bool) -> None:
    """Show a schedule, its runs, and its missed times."""
    schedules = Workspace.from_config(create=False).schedules
    schedule = schedules.find(name)
    row, latest = _row(schedules, schedule), _latest(schedules, name)
    if as_json:
        found: ScheduleDetails = {**row, "occurrences": [_occurrence(one) for one in latest]}
        print_json(found)
        return
    next_time = schedule.next_time(_now())
    print_fields(
        [
            ("Schedule", schedule.name),
            ("When", schedule.when),
            ("Job", schedule.job),
            ("Next", _local(next_time, schedule) if next_time else ""),
            ("State", row["state"]),
            ("Overlap", schedule.overlap),
            ("Missed", f"{schedule.missed}{_missed_text(latest, schedule)}" if schedule.cron else ""),
            ("User", schedule.user),
        ]
    )
    if latest:
        print()
        print_table(
            ("WHAT", "STATE", "RUN", "WHY"),
            [
                (_what(one, schedule), one.run_status or one.status, one.run_id or "-", _why(one, schedule))
                for one in latest
            ],
        )
    _warn_of_silence(schedules)


@takes(NAME)
def pause(*, name: str) -> None:
    """Start nothing until the schedule is resumed. Active runs go on."""
    Workspace.from_config(create=False).schedules.pause(name)
    print(f"Schedule {name} is paused. `paceline schedule resume {name}` resumes it.")


@takes(NAME)
def resume(*, name: str) -> None:
    """Resume a paused schedule. Times and events of the pause start nothing."""
    schedules = Workspace.from_config(create=False).schedules
    passed = ticking.resume(schedules, name)
    during = f" {counted(passed, 'time or event')} of the pause starts nothing." if passed else ""
    time = schedules.find(name).next_time(_now())
    print(f"Schedule {name} is resumed.{during}" + (f" Next: {_local(time, schedules[name])}" if time else ""))


@takes(NAME)
def remove(*, name: str) -> None:
    """Remove a schedule. Its runs stay, and go on."""
    Workspace.from_config(create=False).schedules.remove(name)
    print(f"Schedule {name} is removed.")


def _row(schedules: Schedules, schedule: Schedule) -> ScheduleRow:
    latest = _latest(schedules, schedule.name)
    waiting = [one for one in schedules.occurrences(schedule.name).open() if one.status == WAITING]
    try:
        next_time = schedule.next_time(_now())
    except ScheduleError as error:
        next_time = None
        warn(f"paceline: schedule {schedule.name}: {error}")
    return {
        "name": schedule.name,
        "when": schedule.when,
        "cron": schedule.cron,
        "time_zone": schedule.time_zone,
        "on_dataset": list(schedule.on_dataset),
        "on_model": list(schedule.on_model),
        "after": list(schedule.after),
        "ended": schedule.ended,
        "job": schedule.job,
        "parameters": dict(schedule.parameters),
        "overlap": schedule.overlap,
        "missed": schedule.missed,
        "user": schedule.user,
        "paused": schedule.is_paused,
        "state": _state(schedule, latest, waiting),
        "next_utc": next_time.isoformat() if next_time else None,
        "waiting": len(waiting),
        "last": _occurrence(latest[0]) if latest else None,
    }


def _latest(schedules: Schedules, name: str) -> list[Occurrence]:
    """Return a schedule's newest events, with the present status of the runs that these started."""
    runs_dir = schedules.workspace_dir / "runs"
    return [
        dataclasses.replace(one, run_status=ticking.end_of(one, runs_dir))
        if one.status == STARTED and one.run_status is None
        else one
        for one in schedules.occurrences(name).latest(_SHOWN)
    ]


def _state(schedule: Schedule, latest: list[Occurrence], waiting: list[Occurrence]) -> str:
    parts = ["paused"] if schedule.is_paused else []
    if waiting:
        parts.append(f"{len(waiting)} waiting")
    if latest and latest[0].status != WAITING:
        parts.append(latest[0].run_status or {STARTED: "running"}.get(latest[0].status, latest[0].status))
        if latest[0].missed_count:
            parts.append(f"{latest[0].missed_count} times missed")
    return ", ".join(dict.fromkeys(parts)) or "-"


def _occurrence(one: Occurrence) -> OccurrenceRow:
    first, last = one.missed_first or "", one.missed_last or ""
    missed: MissedTimes = {"count": one.missed_count, "first_utc": first, "last_utc": last}
    return {
        "kind": one.kind,
        "what": one.what,
        "time_utc": one.time_utc,
        "status": one.status,
        "run_id": one.run_id,
        "run_status": one.run_status,
        "reason": one.reason,
        "late": one.is_late,
        "missed": missed if one.missed_count else None,
    }


def _what(one: Occurrence, schedule: Schedule) -> str:
    if one.kind == TIME:
        return _local(dt.datetime.fromisoformat(one.what), schedule)
    return "by hand" if one.kind == HAND else f"{one.kind} {one.what}"


def _why(one: Occurrence, schedule: Schedule) -> str:
    parts = [one.reason] if one.reason else []
    if one.is_late and one.status != MISSED:
        parts.append(f"late, at {_local(dt.datetime.fromisoformat(one.time_utc), schedule)}")
    if one.missed_count and one.missed_first and one.missed_last:
        first, last = (
            _local(dt.datetime.fromisoformat(text), schedule) for text in (one.missed_first, one.missed_last)
        )
        parts.append(
            f"{counted(one.missed_count, 'time')} missed before: {first if first == last else f'{first} to {last}'}"
        )
    return "; ".join(parts) or "-"


def _missed_text(latest: list[Occurrence], schedule: Schedule) -> str:
    count = sum(one.missed_count + (one.status == MISSED) for one in latest)
    return f"; {counted(count, 'time')} missed among the last {len(latest)}" if count else ""


def _local(time: dt.datetime, schedule: Schedule) -> str:
    return times.shown(time, schedule.time_zone or times.local_zone())


def _now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)


verbs = {
    "add": add,
    "list": list_schedules,
    "show": show,
    "run": run,
    "pause": pause,
    "resume": resume,
    "remove": remove,
    "tick": tick,
}
