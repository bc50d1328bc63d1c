"""Compare two runs: parameters, code, environment, data, topology, and metrics."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.job.job import Job
from paceline.runs import read, series
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import json_safe
from paceline.runs.record import RunRecord
from paceline.runs.run_data import inputs_by_name
from paceline.runs.search.params import arguments_by_name
from paceline.runs.series import MetricSeries
from paceline.system import linked
from paceline.system.files import read_json

#: Fields of a job that describe the topology. Differences of most other fields are reported under `settings`.
_TOPOLOGY = (
    *("compute_target", "node_count", "process_count_per_node", "worker_count", "parameter_server_count"),
    *("distributed_backend", "use_gpu", "gpu_visibility", "gpu_share", "cores", "priority"),
)
_ELSEWHERE = ("version", "arguments", "environment", "environment_variables", "secrets", "inputs", *_TOPOLOGY)
#: Fields of an input that identify its content.
_DATA = ("dataset", "fingerprint", "content", "files", "bytes")

#: If a file has more bytes than this, it is only reported as different, without a diff.
_LARGEST_TEXT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference between two runs. A missing value is None."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A metric that differs, or that only one of the two runs has.

    Attributes:
        step: First step at which the values differ; None if all common steps have equal values.
        by_step: False if values have no steps. `step` is then the index of the value, from 0.
        a, b: The metric's values at `step` in the first and in the second run.
        last_a, last_b: The last value in each run.
        count_a, count_b: The number of values in each run.
    """

    name: str
    step: int | None
    by_step: bool
    a: object
    b: object
    last_a: object
    last_b: object
    count_a: int
    count_b: int


@dataclass(frozen=True, kw_only=True)
class RunDiff:
    """All differences between two runs.

    Attributes:
        parameters: Differences in the script's arguments, by option where possible, and in environment variables.
        settings: Differences in other fields of the job.
        code: Source files that differ.
        code_note: Reason why the source files could not be compared, or None.
        git: Differences in commit, branch and uncommitted edits.
        environment: Differences in the versions of packages: installed packages if known, else requested packages.
        data: Differences in the inputs and their fingerprints.
        topology: Differences in target, nodes, processes and devices.
        metrics: Metrics that differ, sorted by the first step that differs.
        same_metrics: Names of metrics with equal values.
    """

    a: str
    b: str
    parameters: tuple[Change, ...]
    settings: tuple[Change, ...]
    code: tuple[FileChange, ...]
    code_note: str | None
    git: tuple[Change, ...]
    environment: tuple[Change, ...]
    data: tuple[Change, ...]
    topology: tuple[Change, ...]
    metrics: tuple[MetricChange, ...]
    same_metrics: tuple[str, ...]

    @property
    def parting(self) -> MetricChange | None:
        """Return the metric that differs at the earliest step, or None."""
        return next((change for change in self.metrics if change.step is not None), None)

    def to_json(self) -> dict[str, object]:
        """Return the differences as JSON values; NaN and the infinities become strings."""
        parts: dict[str, object] = json_safe(asdict(self))
        parts["code"] = [
            {
                "name": change.name,
                "status": change.status,
                "plus": change.plus,
                "minus": change.minus,
                "text": "\n".join(change.text),
            }
            for change in self.code
        ]
        return parts | {"parting": json_safe(asdict(self.parting)) if self.parting else None}


def sides(folder: RunFolder, record: RunRecord) -> dict[str, dict[str, object]]:
    """Return a run's settings as {kind, such as "code": {name: value}}, to compare runs."""
    return {
        "parameters": _parameters(record),
        "topology": _topology(record),
        "settings": _settings(record),
        "code": {"snapshot": (record.snapshot_id or "")[:16], **record.git},
        "data": _data(folder, record),
        "environment": _environment(folder, record),
    }


def compare(a: RunFolder, b: RunFolder) -> RunDiff:
    """Return the differences between two runs, which may still be running.

    Raises:
        RunNotFoundError: The record of one of the runs can't be read.
    """
    first, second = read.record(a), read.record(b)
    code, note = _code(a, b, first, second)
    parted, same = _metrics(a, b)
    return RunDiff(
        a=first.run_id,
        b=second.run_id,
        parameters=_changes(_parameters(first), _parameters(second)),
        settings=_changes(_settings(first), _settings(second)),
        code=code,
        code_note=note,
        git=_changes(first.git, second.git),
        environment=_changes(_environment(a, first), _environment(b, second)),
        data=_changes(_data(a, first), _data(b, second)),
        topology=_changes(_topology(first), _topology(second)),
        metrics=parted,
        same_metrics=same,
    )


def _changes(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Change, ...]:
    names = dict.fromkeys((*a, *b))
    return tuple(Change(name=name, a=a.get(name), b=b.get(name)) for name in names if a.get(name) != b.get(name))


# --- differences of two runs' jobs


def _parameters(record: RunRecord) -> dict[str, object]:
    job = record.job
    if job is None:
        return {}
    variables = job.shown()["environment_variables"]
    places = {f"${name}": f"secret of {place}" for name, place in job.secrets.items()}
    return {
        "script": " ".join(job.entry_words),
        **arguments_by_name(job.arguments),
        **{f"${name}": text for name, text in variables.items()},
        **places,
    }


def _settings(record: RunRecord) -> dict[str, object]:
    values = record.job.to_json() if record.job else {}
    names = (name for name in values if name not in (*_ELSEWHERE, "entry_script", "entry_module"))
    return {name: values[name] for name in names}


def _topology(record: RunRecord) -> dict[str, object]:
    values = record.job.to_json() if record.job else {}
    topology = {name: values[name] for name in _TOPOLOGY if name in values}
    if record.job:
        topology["world_size"] = record.job.world_size
    if record.attempts:
        last = record.attempts[-1]
        topology |= {"nodes": ", ".join(last.nodes), "cores": last.cores, "gpus": last.gpus}
    return topology


# --- differences of two runs' environment, data and code


def _environment(folder: RunFolder, record: RunRecord) -> dict[str, object]:
    job: Job | None = record.job
    requested = job.environment.to_json() if job else {}
    requested.pop("environment_variables", None)
    built = read_json(folder.environment)
    if not isinstance(built, dict):
        return {f"asked: {name}": value for name, value in requested.items()}
    # Leave out the requested packages and lock files, because the installed versions below already show their effect.
    parts: dict[str, object] = {
        f"asked: {name}": requested[name] for name in ("docker_image", "layered") if name in requested
    }
    parts["base_python"] = built.get("base_python")
    for text in built.get("pip") or ():
        name, _, version = str(text).partition("==")
        parts[name] = version or str(text)
    for text in built.get("conda") or ():
        name, _, version = str(text).partition("=")
        parts[f"conda: {name}"] = version or str(text)
    return parts


def _data(folder: RunFolder, record: RunRecord) -> dict[str, object]:
    first: Mapping[str, Mapping[str, object]] = inputs_by_name(folder)
    if not first and record.job is not None:
        first = {data_input.name: data_input.to_json() for data_input in record.job.inputs}
    parts: dict[str, object] = {}
    for name, data_input in first.items():
        parts[name] = data_input.get("source") or data_input.get("sources") or data_input.get("path")
        parts |= {f"{name}: {key}": data_input[key] for key in _DATA if data_input.get(key) is not None}
    # If data was not copied, compare the number, size and time of its files instead of their content.
    left = [one for one in linked.read(folder.linked) if one.is_linked]
    return parts | {f"{one.path}: files, bytes, changed": [one.files, one.size, one.changed_ns] for one in left}


def _code(a: RunFolder, b: RunFolder, first: RunRecord, second: RunRecord) -> tuple[tuple[FileChange, ...], str | None]:
    if first.snapshot_id is not None and first.snapshot_id == second.snapshot_id:
        return (), None
    for folder, record in ((a, first), (b, second)):
        if record.snapshot_id is None:
            return (), f"run {record.run_id} has no snapshot: a program logs it by itself"
        if not folder.snapshot.is_dir():
            return (), f"the snapshot of run {record.run_id} is not here any more"
    return tuple(file_changes(a.snapshot.resolve(), b.snapshot.resolve())), None


# --- differences of two runs' metrics


def _metrics(a: RunFolder, b: RunFolder) -> tuple[tuple[MetricChange, ...], tuple[str, ...]]:
    mine, theirs = series.read(a.metrics), series.read(b.metrics)
    parted, same = [], []
    for name in dict.fromkeys((*mine, *theirs)):
        own, other = (found.get(name, MetricSeries(name=name)) for found in (mine, theirs))
        change = _part(name, own, other)
        if change.step is None and change.count_a == change.count_b:
            same.append(name)
        else:
            parted.append(change)
    # Sort by the first step with a difference. Metrics that differ only in their number of values come last.
    parted.sort(key=lambda change: (change.step is None, change.step or 0))
    return tuple(parted), tuple(same)


def _part(name: str, a: MetricSeries, b: MetricSeries) -> MetricChange:
    mine, theirs = _of_one_rank(a), _of_one_rank(b)
    by_step = all(None not in steps and len(set(steps)) == len(steps) for steps in (mine[0], theirs[0]))
    columns = [
        dict(zip(steps if by_step else range(len(steps)), values, strict=True)) for steps, values in (mine, theirs)
    ]
    both = sorted(columns[0].keys() & columns[1].keys(), key=lambda step: step or 0)
    step = next((step for step in both if not is_equal(columns[0][step], columns[1][step])), None)
    return MetricChange(
        name=name,
        step=step,
        by_step=by_step,
        a=columns[0].get(step) if step is not None else None,
        b=columns[1].get(step) if step is not None else None,
        last_a=a.last,
        last_b=b.last,
        count_a=len(mine[1]),
        count_b=len(theirs[1]),
    )


def _of_one_rank(found: MetricSeries) -> tuple[list[int | None], list[object]]:
    """Return steps and values of the lowest rank that logged a metric."""
    lowest = min(found.ranks, default=0)
    kept = [number for number, rank in enumerate(found.ranks) if rank == lowest]
    return [found.steps[number] for number in kept], [found.values[number] for number in kept]


def is_equal(a: object, b: object) -> bool:
    """Return whether two values are equal. NaN equals NaN."""
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A file that differs between two runs.

    Attributes:
        status: "added", "removed" or "changed".
        text: Lines of a unified diff with header. Empty for binary files and for files over 1 MiB.
        plus: Number of added lines.
        minus: Number of removed lines.
    """

    name: str
    status: str
    text: tuple[str, ...] = ()

    @property
    def plus(self) -> int:
        return sum(line.startswith("+") for line in self.text[2:])

    @property
    def minus(self) -> int:
        return sum(line.startswith("-") for line in self.text[2:])


def file_changes(a: Path, b: Path) -> Iterator[FileChange]:
    """Yield the change of each file that differs between two source folders."""
    mine, theirs = _files(a), _files(b)
    for name in sorted(mine | theirs):
        status = "added" if name not in mine else "removed" if name not in theirs else "changed"
        if status == "changed" and _is_same(a / name, b / name):
            continue
        before, after = (_text(top / name) if name in there else "" for top, there in ((a, mine), (b, theirs)))
        text: tuple[str, ...] = ()
        if before is not None and after is not None:
            names = (f"a/{name}" if name in mine else "/dev/null", f"b/{name}" if name in theirs else "/dev/null")
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="")
            text = tuple(lines)
        yield FileChange(name=name, status=status, text=text)


def _files(top: Path) -> set[str]:
    found = set[str]()
    for folder, folders, names in os.walk(top):
        # os.walk lists a link to a folder among the folders. This comparison treats the link as a file.
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found |= {os.path.relpath(os.path.join(folder, name), top) for name in (*names, *links)}
    return found


def _is_same(a: Path, b: Path) -> bool:
    if a.is_symlink() or b.is_symlink():
        return a.is_symlink() and b.is_symlink() and os.readlink(a) == os.readlink(b)
    # Don't read a file that is the same in both snapshots: equal files are hard links to one file.
    return os.path.samefile(a, b) or (a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes())


def _text(path: Path) -> str | None:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.stat().st_size > _LARGEST_TEXT:
        return None
    data = path.read_bytes()
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
