"""Check all schedules for new events, and start runs for them. The timer does this each minute.

    new times, versions, ended runs ── claim ── waiting ──┬── started ── ended
                                                          └── skipped, missed, failed

All state is in files, so the next check completes a check that was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import EngineError, PacelineError, RunNotFoundError, ScheduleError
from paceline.runs import read, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import experiment_of, is_run_id, is_trial
from paceline.runs.record import parse_utc
from paceline.schedules import occurrences, times
from paceline.schedules.occurrences import Occurrence
from paceline.schedules.schedule import ANY, ONCE, SKIP, TAG, Schedule, named_occurrence, since, time_occurrence
from paceline.schedules.schedules import Schedules
from paceline.system import locks
from paceline.system.files import gone_is_fine

#: A function that submits an occurrence's run. It first calls its third argument with the run's id. May raise PacelineError.
Start = Callable[[Schedule, Occurrence, Callable[[str], None]], None]
#: A planned time this many seconds ago counts as missed: timers tick each minute, or later on a busy machine.
LATE_S = 300.0
#: Seconds during which a failed start is repeated if a scheduler, a host or a store does not answer.
_PATIENCE_S = 3600.0


def tick(workspace_dir: Path, start: Start, now: dt.datetime | None = None) -> list[str]:
    """Start the due runs of this user. Return error messages of schedules that failed.

    Return [] immediately if another process already checks the schedules.
    """
    schedules = Schedules(workspace_dir)
    if not schedules.lock_path.parent.is_dir() or (fd := locks.take(schedules.lock_path)) is None:
        return []
    problems: list[str] = []
    try:
        with gone_is_fine():
            schedules.tick_path.touch()
        # A killed `schedule add` or `schedule remove` leaves a timer without schedules.
        schedules.remove_idle_timer()
        for name in schedules:
            if schedules.is_own(name):
                try:
                    problems += _Look(schedules, schedules[name], now).take(start)
                except Exception as error:  # another user may have written a record with values of wrong types
                    problems.append(f"schedule {name}: {error}")
    finally:
        os.close(fd)
    return problems


def is_due(workspace_dir: Path) -> bool:
    """Return whether `tick` has something to do in this workspace."""
    schedules = Schedules(workspace_dir)
    with gone_is_fine():
        schedules.tick_path.touch()
    own = [name for name in schedules if schedules.is_own(name)]
    return not own or any(_is_due(schedules, name) for name in own)


def _is_due(schedules: Schedules, name: str) -> bool:
    try:
        return _Look(schedules, schedules[name]).is_due()
    except Exception:  # `tick` meets the same error, and reports it
        return True


def start_now(schedules: Schedules, name: str, start: Start) -> Occurrence:
    """Start a run of a schedule by hand, and return its occurrence.

    Raises:
        PacelineError: There is no such schedule, or the run can't be submitted.
    """
    with schedules.locked():
        look = _Look(schedules, schedules.find(name))
        made = named_occurrence(occurrences.HAND, "", look.now)
        look.kept.claim(made)
        done = look.begin(made, start)
    if done.status != occurrences.STARTED:
        raise ScheduleError(f"schedule {name!r} could not start a run: {done.reason}")
    return done


def resume(schedules: Schedules, name: str) -> int:
    """Resume a paused schedule. Return how many events of the pause are skipped.

    Raises:
        ScheduleError: There is no such schedule, or it is not paused.
    """
    with schedules.locked():
        schedule = schedules.find(name)
        if not schedule.is_paused:
            raise ScheduleError(f"schedule {name!r} is not paused. `paceline schedule pause {name}` pauses it.")
        look = _Look(schedules, schedule)
        count = 0
        for one in look.new():
            passed = dataclasses.replace(one, status=occurrences.SKIPPED, reason="the schedule was paused")
            if look.kept.claim(passed):
                count += 1 + one.missed_count
                look.kept.finish(passed)
        (schedules.folder(name) / "paused.json").unlink(missing_ok=True)
    return count


def end_of(occurrence: Occurrence, runs_dir: Path) -> str | None:
    """Return the final status of an occurrence's run; None while it is active."""
    try:
        record = read.record(RunFolder(runs_dir / (occurrence.run_id or "")))
    except RunNotFoundError:
        return "deleted"
    return record.status if record.is_terminal else None


class _Look:
    """One check of a schedule for new events."""

    def __init__(self, schedules: Schedules, schedule: Schedule, now: dt.datetime | None = None) -> None:
        self.now = now or dt.datetime.now(dt.timezone.utc)
        self.kept = schedules.occurrences(schedule.name)
        self._schedules, self._schedule = schedules, schedule
        self._workspace_dir = schedules.workspace_dir
        self._runs_dir = self._workspace_dir / "runs"

    def is_due(self) -> bool:
        is_free, waiting = True, []
        for one in self.kept.open():
            if one.status == occurrences.WAITING:
                waiting.append(one)
            elif one.status != occurrences.STARTED or end_of(one, self._runs_dir) is not None:
                return True
            else:
                is_free = False
        if self._schedule.is_paused:
            return False
        may_start = any(is_free or one.run_id is not None for one in waiting)
        return may_start or any(True for _ in self.new())

    def take(self, start: Start) -> list[str]:
        going = self._going()
        if self._schedule.is_paused:
            return []
        for one in self.new():
            self._claim(one)
        problems = []
        for one in self._waiting():
            # Complete an interrupted submission (an occurrence with a run id) even if another run of the schedule is active.
            if going and one.run_id is None:
                if self._schedule.overlap == SKIP:
                    self.kept.finish(
                        dataclasses.replace(one, status=occurrences.SKIPPED, reason=f"run {going[0]} was going on")
                    )
                elif one.reason != (reason := f"waits for the end of run {going[0]}"):
                    self.kept.keep(dataclasses.replace(one, reason=reason))
                continue
            done = self.begin(one, start)
            if done.status == occurrences.STARTED and done.run_id is not None:
                going.append(done.run_id)
            elif done.reason:
                problems.append(f"schedule {self._schedule.name}, {done.kind} {done.what}: {done.reason}")
        self.kept.prune()
        return problems

    def begin(self, occurrence: Occurrence, start: Start) -> Occurrence:
        """Start the run of an occurrence. Return the occurrence with its new status."""
        now = occurrence

        def keep(run_id: str) -> None:
            nonlocal now
            now = dataclasses.replace(now, run_id=run_id, reason="")
            self.kept.keep(now)

        try:
            start(self._schedule, occurrence, keep)
        except EngineError as error:
            age = (self.now - parse_utc(occurrence.time_utc)).total_seconds()
            if occurrence.kind != occurrences.HAND and age < _PATIENCE_S:
                tried = dataclasses.replace(now, reason=f"will be tried again: {error}")
                self.kept.keep(tried)
                return tried
            now = dataclasses.replace(now, status=occurrences.FAILED, reason=str(error))
        except PacelineError as error:
            now = dataclasses.replace(now, status=occurrences.FAILED, reason=str(error))
        else:
            now = dataclasses.replace(now, status=occurrences.STARTED, reason="")
            self.kept.keep(now)
            return now
        self.kept.finish(now)
        return now

    def _going(self) -> list[str]:
        """Return ids of the schedule's active runs, and record its ended runs."""
        going = []
        for one in self.kept.open():
            if one.status == occurrences.STARTED and (status := end_of(one, self._runs_dir)) is not None:
                self.kept.finish(dataclasses.replace(one, run_status=status))
            elif one.status == occurrences.STARTED:
                going.append(one.run_id or "")
            elif one.status != occurrences.WAITING:
                self.kept.finish(one)  # an earlier tick was killed before it moved the occurrence's file
        return going

    def _claim(self, occurrence: Occurrence) -> None:
        if reason := self._passes_over(occurrence):
            occurrence = dataclasses.replace(occurrence, status=occurrences.SKIPPED, reason=reason)
        elif occurrence.is_late and self._schedule.missed != ONCE:
            occurrence = dataclasses.replace(
                occurrence, status=occurrences.MISSED, reason="the machine or the timer was off at that time"
            )
        if self.kept.claim(occurrence) and occurrence.status != occurrences.WAITING:
            self.kept.finish(occurrence)

    def _waiting(self) -> list[Occurrence]:
        """Return the waiting occurrences. Of several waiting times, keep only the latest."""
        waiting = [one for one in self.kept.open() if one.status == occurrences.WAITING]
        times_now = [one for one in waiting if one.kind == occurrences.TIME and one.run_id is None]
        # Skip all waiting times but the latest: if a run takes longer than the interval, the schedule would never catch up.
        for one in times_now[:-1]:
            self.kept.finish(
                dataclasses.replace(one, status=occurrences.SKIPPED, reason="the next time came before it could start")
            )
        return [one for one in waiting if one not in times_now[:-1]]

    def new(self) -> Iterator[Occurrence]:
        """Yield an occurrence for each new time, version and ended run."""
        schedule = self._schedule
        if schedule.cron:
            found = times.due(schedule.cron, schedule.time_zone or "UTC", since(schedule, self.kept), self.now)
            if found is not None:
                yield time_occurrence(found, self.now, late_s=LATE_S)
        for kind, names in ((occurrences.DATASET, schedule.on_dataset), (occurrences.MODEL, schedule.on_model)):
            taken = self.kept.keys(kind) if names else set()
            for name in names:
                for version in self._schedules.versions(kind, name):
                    one = named_occurrence(kind, f"{name}:{version}", self.now)
                    if version > schedule.versions.get(f"{kind}:{name}", 0) and one.key not in taken:
                        yield one
        if schedule.after:
            yield from self._ended_runs()

    def _ended_runs(self) -> Iterator[Occurrence]:
        taken, before = self.kept.keys(occurrences.RUN), self._schedules.ended_before(self._schedule.name)
        for run_id in reversed(store.ids(self._runs_dir)):
            is_awaited = run_id in self._schedule.after
            if not is_awaited and (is_trial(run_id) or experiment_of(run_id) not in self._schedule.after):
                continue
            one = named_occurrence(occurrences.RUN, run_id, self.now)
            if one.key in taken or (run_id in before and not is_awaited):
                continue
            with contextlib.suppress(Exception):  # another user may have written the record
                if read.record(RunFolder(self._runs_dir / run_id)).is_terminal:
                    yield one

    def _passes_over(self, occurrence: Occurrence) -> str:
        """Return why an occurrence does not start a run, or "" if it does."""
        if occurrence.kind == occurrences.RUN:
            status = store.stored(RunFolder(self._runs_dir / occurrence.what)).status
            if self._schedule.ended != ANY and status.lower() != self._schedule.ended:
                return f"it ended as {status}"
        # A run of this schedule must not trigger the schedule again: the runs would trigger each other without end.
        made_by = occurrence.what if occurrence.kind == occurrences.RUN else self._made_by(occurrence)
        if made_by is None:
            return ""
        tags = tags_and_properties.read(RunFolder(self._runs_dir / made_by).notes).tags
        return "it is the work of this schedule" if tags.get(TAG) == self._schedule.name else ""

    def _made_by(self, occurrence: Occurrence) -> str | None:
        if occurrence.kind != occurrences.MODEL:
            return None
        from paceline.models import registry

        name, _, version = occurrence.what.rpartition(":")
        match registry.versions_of(self._workspace_dir).read(name, int(version)):
            case {"run": {"run_id": run_id}} if is_run_id(run_id):
                return run_id
        return None
