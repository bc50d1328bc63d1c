"""The frozen record of a run: what `run.json` holds."""

from __future__ import annotations

import datetime as dt
import getpass
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.job.job import Job
from paceline.runs.failure import FailureReport
from paceline.runs.states import NOT_STARTED, TERMINAL
from paceline.system.serialization import known_fields, plain_fields

RECORD_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One launch of all workers.

    nodes: their names, in order of node rank. cores, gpus: what the run held, of all nodes; None in records of earlier versions.
    world_size: its workers. reason: why it was made, in words: "start", "node b was lost". None in records of earlier versions.
    exit_codes: rank -> exit code as a shell gives it (128+n for signal n); ranks still running are absent.
    """

    number: int
    started_utc: str
    ended_utc: str | None = None
    nodes: tuple[str, ...] = ()
    cores: int | None = None
    gpus: int | None = None
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    cause: str | None = None
    world_size: int | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as `run.json` has them."""
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        values = known_fields(cls, data)
        values["nodes"] = tuple(values.get("nodes") or ())
        return cls(**values)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunRecord:
    """The record of a run: all that is known of it.

    run_id, experiment: the run's id, and the experiment that it belongs to. parent_run_id: the run that it stands below.
    kind: "script" for one with a supervisor, "interactive" for one that a program logs by itself (`start_logging`), "sweep" for
        one whose children try points of a space, "pipeline" for one whose children are its steps.
    pipeline: its steps (`paceline.pipelines.spec`). step: of a pipeline's child, its number and name; key, by which it is known
        again where nothing has changed; reused_from, the run whose outputs it has taken over.
    sweep: what a sweep tries (`paceline.sweeps.spec`). trial: of a sweep's child, its number, its point as samplers know it
        (chosen) and as its script gets it (values).
    status: one of `paceline.runs.states`.
    created_utc, started_utc, ended_utc: UTC, ISO 8601 with milliseconds. submitted_by, canceled_by: names of users.
    target: its compute target. job: what it runs. attempts: each launch of its workers. waiting_for: why it is in a queue.
    source_directory, snapshot_id: the folder that was copied, and its copy.
    git: commit, branch, dirty and repository_uri of the source directory, where it lies in a git repository.
    owner: pid, host and boot id of the process that looks after the run.
    size: of an elastic run, "nodes 3 of 2..4", and what is to become of that; of one that has ended, as it was last.
    scratch_dir: a folder outside the run's that its end removes.
    exit_code: what `paceline run` exits with; None until the end.
    warnings: sentences on what is no failure, and may not be what was meant: workers that each trained alone, a disk that
        fills up.
    hang: of a run that hangs, {"since_utc", "text", "report"}: when anything came last, why, and the report's name in the run's
        folder. Of one that has ended, how it hung at its end.
    left_out: {"name": ..., "why": ...} of names in the run's folders of files that are no files of the run's, such as a
        link that leads out of it, and are not stored or brought back; 100 at most. left_out_count: how many there are.
    """

    run_id: str
    experiment: str
    kind: str = "script"
    status: str = NOT_STARTED
    parent_run_id: str | None = None
    sweep: Mapping[str, Any] | None = None
    trial: Mapping[str, Any] | None = None
    pipeline: Mapping[str, Any] | None = None
    step: Mapping[str, Any] | None = None
    created_utc: str = ""
    started_utc: str | None = None
    ended_utc: str | None = None
    submitted_by: str = ""
    target: str | None = None
    source_directory: str | None = None
    snapshot_id: str | None = None
    git: Mapping[str, Any] = field(default_factory=dict)
    job: Job | None = None
    owner: Mapping[str, Any] = field(default_factory=dict)
    scratch_dir: str | None = None
    waiting_for: str | None = None
    attempts: tuple[Attempt, ...] = ()
    size: str | None = None
    exit_code: int | None = None
    failure: FailureReport | None = None
    canceled_by: str | None = None
    warnings: tuple[str, ...] = ()
    hang: Mapping[str, Any] | None = None
    left_out: tuple[Mapping[str, str], ...] = ()
    left_out_count: int = 0

    def __repr__(self) -> str:
        """Return a line: a notebook's cell that ends with `wait_for_completion()` prints it."""
        code = f", exit_code={self.exit_code}" if self.exit_code is not None else ""
        why = f", failure={self.failure.cause!r}" if self.failure is not None else ""
        return f"RunRecord(run_id={self.run_id!r}, status={self.status!r}{code}{why})"

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self.status in TERMINAL

    @property
    def world_size(self) -> int:
        """The number of workers; 1 without a job."""
        return self.job.world_size if self.job else 1

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start to the end, or to now; None before the start."""
        return duration_s(self.started_utc, self.ended_utc)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as `run.json` has them."""
        return {"version": RECORD_VERSION, **plain_fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRecord:
        """The record that `to_json` wrote; fields of a newer version are left out."""
        values = known_fields(cls, data)
        values["job"] = _job(str(values["run_id"]), data["job"]) if data.get("job") else None
        values["attempts"] = tuple(Attempt.from_json(a) for a in data.get("attempts") or ())
        values["warnings"] = tuple(data.get("warnings") or ())
        values["left_out"] = tuple(data.get("left_out") or ())
        values["failure"] = FailureReport.from_json(data["failure"]) if data.get("failure") else None
        return cls(**values)


#: Run id -> its job as JSON and as a `Job`. Followers read a record many times, and its job never changes.
_jobs: dict[str, tuple[Mapping[str, Any], Job]] = {}
_MOST_JOBS = 64


def _job(run_id: str, data: Mapping[str, Any]) -> Job:
    """Return the job of a record, validated once in a process."""
    known = _jobs.get(run_id)
    if known is None or known[0] != data:
        if len(_jobs) >= _MOST_JOBS:
            _jobs.clear()
        known = _jobs[run_id] = (data, Job.from_json(data))
    return known[1]


def utc_now() -> str:
    """The time, UTC, ISO 8601 with milliseconds and a Z."""
    return utc_text(dt.datetime.now(dt.timezone.utc))


def utc_text(time: dt.datetime) -> str:
    return time.astimezone(dt.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_utc(text: str) -> dt.datetime:
    # Python's own parser takes a Z from 3.11 on.
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00"))


def duration_s(started_utc: str | None, ended_utc: str | None) -> float | None:
    """Seconds from a start to an end, or to now; None before the start."""
    if started_utc is None:
        return None
    end = parse_utc(ended_utc) if ended_utc else dt.datetime.now(dt.timezone.utc)
    # Clocks are set back, and the start may be by the clock of another machine.
    return max(0.0, (end - parse_utc(started_utc)).total_seconds())


def user_name() -> str:
    """The login name; "unknown" in a container whose user has none."""
    try:
        return getpass.getuser()
    # A uid without a name is a KeyError, and from Python 3.13 on an OSError.
    except (KeyError, OSError):
        return "unknown"
