"""The frozen record of a run: fixed fields in `job.json`, changing fields in `state.json`."""

from __future__ import annotations

import datetime as dt
import getpass
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from paceline.job.job import Job
from paceline.job.notify import DEFAULT_EVENTS
from paceline.runs.failure import FailureReport
from paceline.runs.states import NOT_STARTED, RUNNING, TERMINAL
from paceline.system.serialization import fits, known_fields, plain_fields, plain_value, type_hints

RECORD_VERSION = 1

#: Fields that may change after the run's creation. `sweep` is among them, because a sweep can get further trials later.
STATE_FIELDS = (
    *("status", "waiting_for", "started_utc", "ended_utc", "owner", "scratch_dir", "attempts", "size", "exit_code"),
    *("failure", "canceled_by", "warnings", "hang", "left_out", "left_out_count", "sweep"),
)


class Owner(TypedDict, total=False):
    """The process, or cluster job, that writes a run's record.

    `starts` counts the controllers that were started for the run.
    """

    pid: int
    host: str
    boot_id: str
    python: str
    starts: int
    engine: str
    job_id: str


class Hang(TypedDict):
    """A run's hang: its last progress, the reason, and the report's file name."""

    since_utc: str
    text: str
    report: str


#: A trial in the record of its run: its parameters as numbers for samplers (chosen), and as the script gets them (values). For a
#: repeated trial also: the run whose checkpoints it continues (from), its rung, and the reason for the repetition.
TrialEntry = TypedDict(
    "TrialEntry",
    {
        "number": int,
        "chosen": Mapping[str, int | float],
        "values": Mapping[str, object],
        "notes": Mapping[str, Mapping[str, object]],
        "from": str,
        "rung": int,
        "why": str,
    },
    total=False,
)


class StepEntry(TypedDict, total=False):
    """A pipeline's step, its cache key, and the run whose outputs it reuses."""

    number: int
    name: str
    key: str
    reused_from: str


class Replacement(TypedDict):
    """A replacement of lost workers: its time, their ranks, and the cause."""

    started_utc: str
    ranks: list[int]
    cause: str


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One launch of all workers of a run.

    Attributes:
        nodes: Names of the nodes by node rank.
        cores, gpus: CPU cores and GPUs that are allocated on all nodes together.
        world_size: Number of workers.
        reason: Why the attempt started, such as "start" or "node b was lost".
        exit_codes: Exit code of each rank that has ended, as a shell reports it (128+n for signal n).
        replaced: Workers that started again within the attempt (`on_failure="replace"`).
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
    replaced: tuple[Replacement, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the attempt as JSON values, as in `state.json`."""
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        values = known_fields(cls, data)
        for name in ("nodes", "replaced"):
            values[name] = tuple(values.get(name) or ())
        return cls(**values)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunRecord:
    """The record of a run, with times in UTC (ISO 8601, milliseconds).

    Args:
        run_id: The run's id.
        experiment: Name of its experiment.
        kind: "script" (a supervisor runs it), "interactive" (a program logs it, `start_logging`), "sweep" (its child
            runs try points of a space) or "pipeline" (its child runs are steps).
        status: A value of `paceline.runs.states`.
        parent_run_id: Id of the parent run; None if the run is no child.
        sweep: For a sweep: its parameters and search settings (`paceline.sweeps.spec`).
        trial: For a sweep's child: its number, `chosen` (raw values from the sampler) and `values` (values that the script gets).
        pipeline: For a pipeline: its steps (`paceline.pipelines.spec`).
        step: For a pipeline's child: its number, name and cache key, and `reused_from`, the run whose outputs it reuses.
        created_utc: Time of the submission.
        started_utc: Start of the first attempt.
        ended_utc: Time of the end.
        submitted_by: Name of the user who submitted the run.
        target: Name of the compute target.
        source_directory: The folder with the script, which was copied at submission.
        snapshot_id: Id of this copy (`paceline.snapshot`).
        git: "commit", "branch", "dirty" and "repository_uri" of the source directory.
        job: The job that the run executes.
        program: The command line of a program that logs an interactive run.
        owner: Process id, host and boot id of the process that writes the record.
        scratch_dir: A folder outside the run's folder, removed at the run's end.
        waiting_for: The reason why the run is queued, or None.
        attempts: The launches of all workers of the run, in order.
        size: Size of an elastic run, such as "nodes 3 of 2..4", with its pending change.
        exit_code: Exit code with which `paceline run` ends; None before the run's end.
        failure: The report of a failed run.
        canceled_by: Name of the user who canceled the run.
        warnings: Sentences on probable mistakes, such as workers that trained alone or a disk that fills up.
        hang: The current hang as {"since_utc", "text", "report"} (`Hang`), or None.
        left_out: {"name", "why"} of at most 100 files that are neither stored nor fetched, such as links out of the folder.
        left_out_count: Number of all files that are neither stored nor fetched.

    Examples:
        >>> experiment = pl.Experiment(pl.Workspace("my_runs"), "digits")
        >>> record = experiment.submit(pl.Estimator(entry_script="train.py")).wait_for_completion()
        >>> record.status, record.exit_code, record.target
        ('Completed', 0, 'local')
    """

    run_id: str
    experiment: str
    kind: str = "script"
    status: str = NOT_STARTED
    parent_run_id: str | None = None
    sweep: Mapping[str, object] | None = None
    trial: TrialEntry | None = None
    pipeline: Mapping[str, object] | None = None
    step: StepEntry | None = None
    created_utc: str = ""
    started_utc: str | None = None
    ended_utc: str | None = None
    submitted_by: str = ""
    target: str | None = None
    source_directory: str | None = None
    snapshot_id: str | None = None
    git: Mapping[str, Any] = field(default_factory=dict)
    job: Job | None = None
    program: tuple[str, ...] = ()
    owner: Owner = field(default_factory=Owner)
    scratch_dir: str | None = None
    waiting_for: str | None = None
    attempts: tuple[Attempt, ...] = ()
    size: str | None = None
    exit_code: int | None = None
    failure: FailureReport | None = None
    canceled_by: str | None = None
    warnings: tuple[str, ...] = ()
    hang: Hang | None = None
    left_out: tuple[Mapping[str, str], ...] = ()
    left_out_count: int = 0

    def __repr__(self) -> str:
        """Return a one-line summary, which a notebook shows as a cell's value."""
        code = f", exit_code={self.exit_code}" if self.exit_code is not None else ""
        why = f", failure={self.failure.cause!r}" if self.failure is not None else ""
        return f"RunRecord(run_id={self.run_id!r}, status={self.status!r}{code}{why})"

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended."""
        return self.status in TERMINAL

    @property
    def world_size(self) -> int:
        """The number of workers, or 1 for a run without a job."""
        return self.job.world_size if self.job else 1

    @property
    def command(self) -> tuple[str, ...]:
        """The script or program with its arguments; empty for sweeps."""
        return self.program if self.job is None else (*self.job.entry_words, *self.job.arguments)

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start to the end (or now); None before the start."""
        return duration_s(self.started_utc, self.ended_utc)

    @property
    def receivers(self) -> dict[str, set[str]]:
        """The events that each notification receiver of the run or its steps wants."""
        steps: Any = (self.pipeline or {}).get("steps") or ()
        jobs = [(step["job"].get("notify") or (), step["job"].get("notify_on") or DEFAULT_EVENTS) for step in steps]
        found: dict[str, set[str]] = {}
        for notify, events in [*jobs, *([(self.job.notify, self.job.notify_on)] if self.job else [])]:
            for receiver in notify:
                found.setdefault(receiver, set()).update(events)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return all fields of the record as JSON values."""
        return {"version": RECORD_VERSION, **plain_fields(self)}

    def job_json(self) -> dict[str, Any]:
        """Return the record's fields that `job.json` holds."""
        return {name: value for name, value in self.to_json().items() if name not in STATE_FIELDS}

    def state_json(self) -> dict[str, Any]:
        """Return the record's fields that `state.json` holds."""
        return {"version": RECORD_VERSION, **{name: plain_value(getattr(self, name)) for name in STATE_FIELDS}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRecord:
        """Return the record that `to_json` wrote, without newer versions' fields."""
        values = {name: value for name, value in known_fields(cls, data).items() if name not in STATE_FIELDS}
        _check_types({name: value for name, value in values.items() if name not in ("job", "trial")})
        values["job"] = Job.from_json(data["job"]) if data.get("job") else None
        values["program"] = tuple(map(str, data.get("program") or ()))
        return cls(**values).with_state(data)

    def with_state(self, data: Mapping[str, Any]) -> RunRecord:
        """Return the record, updated by `data`, a result of `state_json`.

        Raises:
            ValueError: A value has a type that `state_json` does not write, or a time is invalid.
        """
        values = {name: data[name] for name in STATE_FIELDS if name in data}
        _check_types(values)
        if "attempts" in values:
            values["attempts"] = tuple(Attempt.from_json(attempt) for attempt in values["attempts"] or ())
        for name in values.keys() & {"warnings", "left_out"}:
            values[name] = tuple(values[name] or ())
        if values.get("failure"):
            values["failure"] = FailureReport.from_json(values["failure"])
        record = replace(self, **values)
        hang_utc = record.hang and record.hang["since_utc"]
        times = [record.created_utc or None, record.started_utc, record.ended_utc, hang_utc]
        for time_utc in (*times, *(at for one in record.attempts for at in (one.started_utc, one.ended_utc))):
            duration_s(time_utc, None)  # raises an error for an invalid time
        return record


def _check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not None and not fits(value, type_hints(RunRecord)[name]):
            raise ValueError(f"{name} is {value!r:.80}, which Paceline never writes")


def merged(job: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `job.json` and `state.json` as one dict, in `to_json`'s order."""
    both = {**job, **state}
    names = ("version", *(field.name for field in fields(RunRecord)))
    return {name: both[name] for name in names if name in both}


def utc_now() -> str:
    """Return the time in UTC, ISO 8601 with milliseconds and a Z."""
    return utc_text(dt.datetime.now(dt.timezone.utc))


def utc_text(time: dt.datetime) -> str:
    return time.astimezone(dt.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_at(seconds: float) -> str:
    """Return a Unix time as UTC text, as in records."""
    return utc_text(dt.datetime.fromtimestamp(seconds, dt.timezone.utc))


def parse_utc(text: str) -> dt.datetime:
    # Replace the letter Z, because `fromisoformat` accepts it only from Python 3.11 on.
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00"))


def seconds_of(time_utc: object) -> float | None:
    """Return a record's time as seconds since 1970, or None if invalid."""
    try:
        return parse_utc(time_utc).timestamp() if isinstance(time_utc, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def duration_s(started_utc: str | None, ended_utc: str | None) -> float | None:
    """Return the seconds from start to end (or now); None before the start."""
    if started_utc is None:
        return None
    end = parse_utc(ended_utc) if ended_utc else dt.datetime.now(dt.timezone.utc)
    # Return at least 0: clocks can be set back, and the start time may come from the clock of another machine.
    return max(0.0, (end - parse_utc(started_utc)).total_seconds())


#: Name of the member whose request the web page's server is handling. "" means the user who runs this process.
ACTS_FOR: ContextVar[str] = ContextVar("ACTS_FOR", default="")


def user_name() -> str:
    """Return the user of the web server's current request, else this process's user."""
    return ACTS_FOR.get() or login_name()


def login_name() -> str:
    """Return the login name, or "unknown" for a nameless user of a container."""
    try:
        return getpass.getuser()
    # The uid has no name. In this case Python raises KeyError, and from 3.13 on OSError.
    except (KeyError, OSError):
        return "unknown"


def hang_status(record: RunRecord) -> str:
    """Return the status, such as "Running, hangs since 2026-11-23 06:12:03 UTC"."""
    if record.status != RUNNING or not record.hang:
        return record.status
    return f"{record.status}, hangs since {str(record.hang['since_utc'])[:19].replace('T', ' ')} UTC"


def end_text(record: RunRecord) -> str:
    """Return a run's end as text, such as "Completed in 3.2 s"."""
    took = record.duration_s
    text = record.status + (f" in {duration_text(took)}" if took is not None else "")
    return f"{text}, by {record.canceled_by}" if record.canceled_by else text


def duration_text(seconds: float) -> str:
    """Return a duration as text: "3.2 s", "3 h 20 min"."""
    # Round before comparing: otherwise 59.96 seconds would become "60.0 s".
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
