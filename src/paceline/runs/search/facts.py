"""The facts of a run: a compact record of everything that lists, searches and comparisons need.

Records in shared folders are not trusted: a value of a wrong type counts as missing.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs import read, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import is_run_id, is_trial
from paceline.runs.record import seconds_of, utc_at
from paceline.runs.search.params import LONGEST, ParamValue, packed, params_of
from paceline.runs.search.resources import read_resources
from paceline.runs.search.summaries import NO_METRICS, Goal, MetricSummaries, SummaryReader
from paceline.system.files import read_json, stamp_of

#: State to show, instead of Running, for a run that hangs.
HANGS = "Hangs"
#: Maximum number of tags of a run to keep, and maximum number of characters to keep of a long text.
_MOST_TAGS, LONG = 1000, 1000
#: Matches the word "module:function" of a `paceline.functions` command line, which names the function to run.
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
#: Cache: folder of a sweep -> the goals of the metrics of this sweep.
_goals: dict[Path, dict[str, Goal]] = {}


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """The facts of a run that lists, searches and comparisons need.

    Attributes:
        name: The display name; "" without one.
        created, started, ended: Seconds since 1970.
        size: Nodes times processes on each node, such as "2×4".
        script: The script, such as "train.py", "-m package.train", or "train:main" for a function.
        arguments: The arguments of the script in one line.
        why: The reason for waiting, failing or hanging.
        parent: Id of the run of which this run is a child.
        params: Script arguments, sweep values and tracked parameters (`params_of`).
        metrics: A summary of each metric (`MetricFacts`).
        resources: Memory and CPU time that an ended run used (`read_resources`).
    """

    run_id: str
    experiment: str = ""
    status: str = ""
    kind: str = "script"
    name: str = ""
    target: str = ""
    user: str = ""
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    size: str = ""
    attempts: int = 0
    why: str = ""
    parent: str | None = None
    is_child: bool = False
    script: str = ""
    arguments: str = ""
    description: str = ""
    is_archived: bool = False
    is_hanging: bool = False
    tags: Mapping[str, str | None] = field(default_factory=lambda: packed({}))
    params: Mapping[str, ParamValue] = field(default_factory=lambda: packed({}))
    metrics: MetricSummaries = field(default_factory=lambda: NO_METRICS)
    resources: Mapping[str, float] = field(default_factory=lambda: packed({}))
    #: Hashes that change when a file changes: of the run's record (None once the record is final), and of the run's notes.
    record_stamp: int | None = None
    notes_stamp: int | None = None
    #: Parameters from the run's arguments and from the trial's values, without those that the script itself has tracked.
    given: Mapping[str, ParamValue] = field(default_factory=lambda: packed({}), repr=False)

    @property
    def is_terminal(self) -> bool:
        return self.status in states.TERMINAL

    @property
    def state(self) -> str:
        """The status, or "Hangs" for a running run that hangs."""
        return HANGS if self.is_hanging else self.status

    @property
    def title(self) -> str:
        """The name, or the id of a run without a name."""
        return self.name or self.run_id

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start to the end (or now); None before the start."""
        if self.started is None:
            return None
        # Return at least 0: clocks can be set back, and the start time may come from the clock of another machine.
        return max(0.0, round((time.time() if self.ended is None else self.ended) - self.started, 3))

    @property
    def created_utc(self) -> str:
        return utc_of(self.created) or ""

    @property
    def started_utc(self) -> str | None:
        return utc_of(self.started)

    @property
    def ended_utc(self) -> str | None:
        return utc_of(self.ended)


def read_facts(folder: RunFolder, known: RunFacts | None = None) -> RunFacts | None:
    """Return a run's current facts with its metrics; None without a readable record.

    Args:
        folder: The run's folder.
        known: Earlier facts of the run. The file of its tags, properties and comments is read again only if it has changed.

    Examples:
        >>> facts = read_facts(RunFolder(workspace.runs_dir / "digits_1700000000_00000001"))
        >>> facts.metrics["val_loss"].best, facts.params["lr"]
        (0.25, 0.001)
    """
    facts = read_record_facts(folder, known)
    if facts is not None:
        facts.metrics, facts.resources = read_metrics(folder, facts), packed(read_resources(folder))
    return facts


def read_record_facts(folder: RunFolder, known: RunFacts | None = None) -> RunFacts | None:
    """Return a run's current facts without metrics; None without a readable record."""
    record_stamp, notes_stamp = stamp_hash(folder.state), stamp_hash(folder.notes)
    try:
        # `read.raw` also checks the run's owner, so that a run whose supervisor has died counts as ended.
        facts = _of_record(folder, read.raw(folder) or {})
    # The run was removed, or its record can't be read.
    except (PacelineError, OSError, TypeError, ValueError, AttributeError, KeyError):
        return None
    # Set the id from the folder's name, because the record may be wrong and name another run.
    facts.run_id = folder.run_id
    facts.record_stamp = None if facts.is_terminal else record_stamp
    if known is not None:
        facts.metrics, facts.resources = known.metrics, known.resources
    if known is not None and known.notes_stamp == notes_stamp:
        facts.name, facts.description, facts.is_archived = known.name, known.description, known.is_archived
        facts.tags, facts.params, facts.notes_stamp = known.tags, known.params, notes_stamp
    else:
        add_notes(facts, folder, notes_stamp)
    return facts


def read_metrics(folder: RunFolder, facts: RunFacts, reader: SummaryReader | None = None) -> MetricSummaries:
    """Return a run's metric summaries, with its sweep's goals (minimize or maximize).

    reader: A reader of the run's logs, which reads only new lines. By default, all lines are read.
    """
    found = (reader or SummaryReader(folder.metrics)).look()
    sweep = RunFolder(folder.path.with_name(facts.parent)) if facts.is_child and facts.parent else folder
    return found.with_goals(_goals_of(sweep)) if sweep is not folder or facts.kind == "sweep" else found


def add_notes(facts: RunFacts, folder: RunFolder, stamp: int | None) -> None:
    """Read a run's name, description, tags and tracked parameters into `facts`."""
    facts.notes_stamp = stamp
    noted = tags_and_properties.read(folder.notes)
    facts.name, facts.description = _text(noted.name), _text(noted.description, LONG)
    facts.is_archived = noted.is_archived
    tags = list(noted.tags.items())[:_MOST_TAGS]
    facts.tags = packed({key[:LONGEST]: None if value is None else _text(value) for key, value in tags})
    tracked = params_of((), {}, noted.properties)
    # If the script has tracked no parameters, as in most runs, use the mapping `given` also as `params` to save memory.
    facts.params = packed({**facts.given, **tracked}) if tracked else facts.given


def stamp_hash(path: Path | str) -> int | None:
    """Return a number that changes with a file, or None if it is missing."""
    stamp = stamp_of(path)
    return None if stamp is None else hash(stamp)


def _of_record(folder: RunFolder, data: Mapping[str, object]) -> RunFacts:
    job = _mapping(data.get("job"))
    hang = _mapping(data.get("hang"))
    is_hanging = hang and data.get("status") == states.RUNNING
    since = str(hang.get("since_utc"))[:19].replace("T", " ")
    hangs = f"hangs since {since} UTC: {hang.get('text')}" if is_hanging else ""
    program = [str(word) for word in _list(data.get("program"))]
    words = program[1:] if program else [str(word) for word in _list(job.get("arguments"))]
    module = job.get("entry_module")
    script = f"-m {module}" if module else job.get("entry_script") or "".join(program[:1])
    if module == "paceline.functions" and (names := [word for word in words if _FUNCTION.fullmatch(word)]):
        script, words = names[0], words[words.index(names[0]) + 1 :]
    given = params_of(words, _mapping(_mapping(data.get("trial")).get("values")), {})
    parent = data.get("parent_run_id")
    return RunFacts(
        run_id=str(data["run_id"]),
        experiment=_shared(data.get("experiment")),
        status=_shared(data["status"]),
        kind=_shared(data.get("kind") or "script"),
        target=_shared(data.get("target")),
        user=_shared(data.get("submitted_by")),
        created=seconds_of(data.get("created_utc")),
        started=seconds_of(data.get("started_utc")),
        ended=seconds_of(data.get("ended_utc")),
        size=_shared(job and f"{_nodes(job)}×{job['process_count_per_node']}"),
        attempts=len(_list(data.get("attempts"))),
        why=_shared(_mapping(data.get("failure")).get("message") or data.get("waiting_for") or hangs),
        parent=_shared(parent) if is_run_id(parent) else None,
        is_child=is_trial(folder.run_id),
        script=_shared(script),
        arguments=_text(" ".join(words), LONG),
        given=packed(given),
        is_hanging=bool(is_hanging),
    )


def _goals_of(folder: RunFolder) -> dict[str, Goal]:
    found = _goals.get(folder.path)
    if found is None:
        sweep = _mapping(_mapping(read_json(folder.state)).get("sweep"))
        pairs = zip(_several(sweep.get("metric")), _several(sweep.get("goal")), strict=False)
        known: dict[str, Goal] = {
            name: goal for name, goal in pairs if isinstance(name, str) and goal in ("minimize", "maximize")
        }
        if len(_goals) >= LONG:
            _goals.clear()
        found = _goals[folder.path] = known
    return found


def _nodes(job: Mapping[str, object]) -> str:
    return "..".join(map(str, _list(job.get("node_range")) or [job["node_count"]]))


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _several(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _text(value: object, most: int = LONGEST) -> str:
    return str(value or "")[:most]


def _shared(value: object) -> str:
    return sys.intern(_text(value))


def utc_of(seconds: float | None) -> str | None:
    """Return a Unix time as UTC text, as in records. None stays None."""
    return None if seconds is None else utc_at(seconds)
