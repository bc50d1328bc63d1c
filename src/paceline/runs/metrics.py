"""The metric log of one rank, and a run's metrics from all ranks' logs.

Writing: one JSON line per value, in one `write` to a file opened for appending. When the call returns, the kernel has
the line. So the line survives a SIGKILL, but not a power cut. The cost of a write does not grow with the log. NaN and
the infinities are written as in Python's `json` (NaN, Infinity).

Reading: lines of several ranks are merged by time. One value under a name is a scalar, and several values are a list. A
later attempt replaces the values of earlier attempts from its first step on, as in TensorBoard.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import MetricError
from paceline.runs.folder import metric_logs
from paceline.runs.metric_reader import MetricEntry, is_entry, parsed_lines

Scalar: TypeAlias = "int | float | str | bool"

_MOST_NAMES = 10_000
#: The most characters of a text value as JSON. JSON needs up to six characters for one character of text.
_LONGEST_TEXT = 6 << 20


#: The first 10,000 names that the script itself has logged. The trackers of other libraries don't log these names again.
logged_here: set[str] = set()


class MetricLog:
    """A writer of one rank's metrics in one attempt, safe for threads and forks.

    of_tracker: Whether the values come from another library's tracker instead of the script's own calls.
    """

    def __init__(self, path: Path, *, attempt: int = 1, of_tracker: bool = False) -> None:
        self._path = path
        self._of_tracker = of_tracker
        self._attempt = attempt
        self._fd = -1
        self._names: dict[str, str] = {}
        #: Whether the file may end with a partial line. Readers skip a partial line if the next line is complete.
        self._is_torn = False

    def scalar(self, name: str, value: object, step: int | None = None, time_s: float | None = None) -> None:
        """Append a value of a metric to the log.

        value: An int, float, str, bool, None, or an object whose `.item()` returns a scalar, such as a numpy or torch
        scalar. time_s: Seconds since 1970; by default, the present.

        Raises:
            MetricError: The value has another type. Use `log_list` for lists and generators.
            OSError: The disk is full, and the value is lost.
        """
        # Avoid the slow JSON encoder for frequent types. Compare exact types: True is an int too, and numpy's float64 a float.
        if type(value) is float:
            text = float.__repr__(value) if math.isfinite(value) else json.dumps(value)
        elif type(value) is int:
            text = int.__repr__(value)
        else:
            text = "null" if value is None else json.dumps(plain_scalar(name, value))
            if len(text) > _LONGEST_TEXT:
                text = json.dumps(str(value)[: _LONGEST_TEXT // 6] + " ... (cut)")
        quoted = (self._names.get(name) if isinstance(name, str) else None) or self._quote(name)
        tail = "" if step is None else f',"step":{int(step)}'
        self._write(
            f'{{"name":{quoted},"value":{text},"time":{time.time() if time_s is None else time_s:.6f}{tail}}}\n'.encode()
        )

    def other(self, kind: str, name: str, value: object, step: int | None = None, time_s: float | None = None) -> None:
        """Append a metric value of a kind such as "list" or "table", as plain JSON."""
        if not self._of_tracker and len(logged_here) < _MOST_NAMES:
            logged_here.add(check_name(name))
        at = time.time() if time_s is None else time_s
        line: MetricEntry = {"name": check_name(name), "kind": kind, "value": value, "time": round(at, 6)}
        if step is not None:
            line["step"] = int(step)
        self._write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _quote(self, name: object) -> str:
        quoted = json.dumps(check_name(name))
        # Limit the cache, because a script may log under more and more names, for example with a number in each name.
        if len(self._names) < _MOST_NAMES:
            self._names[str(name)] = quoted
            if not self._of_tracker:
                logged_here.add(str(name))
        return quoted

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            self._open()
        # Begin with a newline, which ends a partial line. After a complete line, readers skip the empty line that results.
        if self._is_torn:
            line = b"\n" + line
        # Until the write has succeeded, assume a partial line, because on a full disk the write may raise an error halfway.
        self._is_torn = True
        # Use no lock: with O_APPEND the kernel appends each write as a whole, from any thread or forked child.
        written = os.write(self._fd, line)
        if written != len(line):
            os.write(self._fd, line[written:])  # raises an error on a full disk, the only reason for a short write
        self._is_torn = False

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Assume a partial line at the end of the file: an earlier process may have been killed while it wrote.
        self._is_torn = True
        start = {"attempt": self._attempt, "pid": os.getpid(), "time": round(time.time(), 6)}
        self._write(json.dumps(start).encode() + b"\n")


def plain_scalar(name: object, value: object) -> Scalar:
    """Return `value` as a Python scalar.

    Raises:
        MetricError: `value` is not a scalar.
    """
    # Call the value's `item`, which works without importing numpy or torch.
    if not isinstance(value, (int, float, str)) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # type: ignore[attr-defined]
        except (ValueError, RuntimeError) as error:
            raise MetricError(
                f"metric {name!r}: a {type(value).__name__} of several values is not a scalar. Use log_list for those."
            ) from error
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # Convert subclasses of float, such as numpy's float64.
        return float(value)
    hint = (
        "Use log_list for several values." if isinstance(value, Iterable) else "Log an int, a float, a str or a bool."
    )
    raise MetricError(f"metric {name!r}: a {type(value).__name__} is not a scalar. {hint}")


def plain_value(value: object) -> Scalar | None:
    """Return a scalar or None unchanged, and any other value as its `repr`.

    Values of a wrong type raise no error, because an error would end the training.
    """
    if value is None:
        return None
    try:
        return plain_scalar("", value)
    except MetricError:
        return repr(value)


def read(directory: Path, *, name: str | None = None, rank: int | None = None) -> dict[str, Any]:
    """Return the metrics under `directory` by name, in order of first appearance.

    A metric that was logged once is a scalar, and a metric that was logged several times is a list. One row is a dict
    of scalars, and several rows are a dict of lists. A table is a dict of lists, and an image its file's name. Several
    lists under one name are joined.

    name: Return only this metric. rank: Return only values of this rank.
    """
    chosen = [paths for number, paths in metric_logs(directory).items() if rank in (None, number)]
    logs = [path for paths in chosen for path in paths.values()]
    if len(logs) == 1 and (found := _values(logs[0], name)) is not None:
        return found
    return {metric: _value(entries) for metric, entries in entries_by_name(directory, name=name, rank=rank).items()}


def _values(path: Path, name: str | None) -> dict[str, Any] | None:
    """Return the metrics in one log by name, with a tenth of `read`'s memory.

    Return None if a name has both scalars and other values, or if the log has several attempts.
    """
    scalars: dict[str, list[Any]] = {}
    others: dict[str, list[MetricEntry]] = {}
    order: dict[str, None] = {}
    for entry in parsed_lines(path):
        if not is_entry(entry):
            if _begun(entry) is not None:
                return None
            continue
        metric = entry["name"]
        if name is not None and metric != name:
            continue
        order[metric] = None
        if entry.get("kind") is None:
            scalars.setdefault(metric, []).append(entry["value"])
        else:
            others.setdefault(metric, []).append(entry)
    if scalars.keys() & others.keys():
        return None
    return {metric: _value(others[metric]) if metric in others else _one_or_all(scalars[metric]) for metric in order}


def entries_by_name(
    directory: Path, *, name: str | None = None, rank: int | None = None
) -> dict[str, list[MetricEntry]]:
    """Return the log entries of each metric, in order of first appearance."""
    ranks = {
        number: _in_sequence(_entries(paths, name))
        for number, paths in metric_logs(directory).items()
        if rank in (None, number)
    }
    return _by_name(ranks)


def placed_entries_by_name(
    directory: Path,
    *,
    name: str | None = None,
    ranks: Collection[int] | None = None,
    attempts: Collection[int] | None = None,
) -> dict[str, list[MetricEntry]]:
    """Return the log entries of each metric, with `rank` and `attempt` added.

    ranks, attempts: Return only entries of these ranks and attempts; None for all.
    """
    found: dict[int, dict[str, list[MetricEntry]]] = {}
    for rank, paths in metric_logs(directory).items():
        if ranks is not None and rank not in ranks:
            continue
        mine = {
            number: entries
            for number, entries in _entries(paths, name).items()
            if attempts is None or number in attempts
        }
        found[rank] = _in_sequence(mine)
        alone = next(iter(mine), 1)
        for entries in found[rank].values():
            for entry in entries:
                entry["rank"] = rank
                entry.setdefault("attempt", alone)  # entries of several attempts already have this field
    return _by_name(found)


def read_by_rank(directory: Path, *, name: str | None = None) -> dict[int, dict[str, Any]]:
    """Return {rank: {metric name: value or list of values}}."""
    return {number: read(directory, name=name, rank=number) for number in metric_logs(directory)}


def json_safe(value: Any) -> Any:
    """Return `value` with NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def check_name(name: object) -> str:
    """Return `name` if it is a valid metric name.

    Raises:
        MetricError: The name is not a non-empty string.
    """
    if not isinstance(name, str) or not name:
        raise MetricError(f"metric name {name!r} is not a non-empty string.")
    return name


def plain_file_name(metric: object) -> str:
    """Return a metric's name as one file name, without `/` and without `..`."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in str(metric))


def _entries(paths: Mapping[int, Path], name: str | None) -> dict[int, dict[str, list[MetricEntry]]]:
    """Return {attempt: {metric: entries}} from one rank's logs, given as {attempt: path}."""
    attempts: dict[int, dict[str, list[MetricEntry]]] = {}
    for attempt, path in paths.items():
        result = attempts.setdefault(attempt, {})
        for entry in parsed_lines(path):
            if is_entry(entry):
                if name is None or entry["name"] == name:
                    result.setdefault(entry["name"], []).append(entry)
            elif attempt == 1 and (of := _begun(entry)) is not None:
                result = attempts.setdefault(of, {})
    return dict(sorted(attempts.items()))


def _begun(line: Any) -> int | None:
    """Return the attempt that a line without a name begins, or None.

    Earlier versions of Paceline wrote all attempts into one file.
    """
    match line:
        case {"attempt": int(number)} if "name" not in line:
            return number
    return None


def _in_sequence(attempts: Mapping[int, dict[str, list[MetricEntry]]]) -> dict[str, list[MetricEntry]]:
    """Return one rank's entries as if its attempts were one uninterrupted run.

    attempt 1      step 0 1 2 3 4         killed; its last checkpoint was from step 3
    attempt 2            .  .  . 3 4 5 6
    together       step 0 1 2 | 3 4 5 6
    """
    if len(attempts) <= 1:
        return dict(next(iter(attempts.values()), {}))
    result: dict[str, list[MetricEntry]] = {}
    for metric in dict.fromkeys(metric for entries in attempts.values() for metric in entries):
        parts = {attempt: entries[metric] for attempt, entries in attempts.items() if metric in entries}
        series: list[MetricEntry] = []
        for attempt, entries in parts.items():
            # Copy the entries, because the code below changes their attempts and times.
            mine: list[MetricEntry] = [{**entry, "attempt": attempt} for entry in entries]
            series = _taken_up(series, mine, is_last=attempt == max(attempts))
        result[metric] = _sortable(series)
    return result


def _taken_up(before: list[MetricEntry], entries: list[MetricEntry], *, is_last: bool) -> list[MetricEntry]:
    """Return a metric's earlier entries, continued by a later attempt's `entries`.

    The later attempt's entries replace earlier entries from its first step to its last. Entries without a step stay.

    is_last: Whether to drop earlier entries after that last step too. Example: `before` has steps 0 to 5, `entries` has
        3 and 4. The result has 0 to 4, or 0 to 5 if a third attempt follows, which may have resumed at step 5.
    """
    steps = [step for entry in entries if (step := _step(entry)) is not None]
    if not steps:
        return before + entries
    first, last = min(steps), math.inf if is_last else max(steps)
    head = [entry for entry in before if (step := _step(entry)) is None or step < first]
    tail = [entry for entry in before if (step := _step(entry)) is not None and step > last]
    return head + entries + tail


def _step(entry: MetricEntry) -> float | None:
    step = entry.get("step")
    return step if isinstance(step, (int, float)) and -math.inf < step < math.inf else None


def _sortable(series: list[MetricEntry]) -> list[MetricEntry]:
    """Raise attempt numbers, and times within an attempt, that would decrease. Return `series`."""
    attempt, time_s = 0, -math.inf
    for entry in series:
        if entry["attempt"] > attempt:
            attempt, time_s = entry["attempt"], -math.inf
        time_s = max(time_s, entry.get("time", 0.0))
        entry["attempt"], entry["time"] = attempt, time_s
    return series


def _by_name(ranks: Mapping[int, Mapping[str, list[MetricEntry]]]) -> dict[str, list[MetricEntry]]:
    merged: dict[str, list[MetricEntry]] = {}
    several = set()
    for entries in ranks.values():
        for metric, values in entries.items():
            if metric in merged:
                several.add(metric)
                merged[metric] = merged[metric] + values
            else:
                merged[metric] = values
    for metric in several:
        # Sort by attempt first, because clocks may differ. The stable sort keeps the order of one rank's values with equal times.
        merged[metric].sort(key=lambda entry: (entry.get("attempt", 1), entry.get("time", 0.0)))
    return merged


def _value(entries: list[MetricEntry]) -> Any:
    kinds = {entry.get("kind") for entry in entries}
    if kinds == {None, "list"}:
        # The name was logged both as single values and as lists. So return one list with all values, in their order.
        return [item for entry in entries for item in (entry["value"] if entry.get("kind") else [entry["value"]])]
    # If a name was logged with several kinds of values, only values of the last kind count.
    kind = entries[-1].get("kind")
    if kind is None:
        return _one_or_all([entry["value"] for entry in entries if entry.get("kind") is None])
    entries = [entry for entry in entries if entry.get("kind") == kind]
    values = [entry["value"] for entry in entries]
    if kind == "list":
        return [item for value in values for item in value]
    if kind == "row":
        return values[0] if len(values) == 1 else _columns(values)
    if kind == "table":
        return values[0] if len(values) == 1 else _joined(values)
    return _one_or_all(values)


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    # Use None as the value of a missing column, so that all columns have equal length.
    return {name: [row.get(name) for row in rows] for name in names}


def _joined(tables: list[dict[str, Any]]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for table in tables:
        for name, column in table.items():
            result.setdefault(name, []).extend(column if isinstance(column, list) else [column])
    return result
