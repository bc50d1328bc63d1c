"""Relay a live run's metrics to MLflow or W&B, each value exactly once.

The supervisor copies the metric logs to the submitting machine, where the relay reads them. So the nodes need no
internet. `relays/<server>.json` in the run's folder records the relay's progress. A batch is some lines of one log:

    write  pending = end of the batch        after a kill or a lost connection from here on, the batch is doubtful: the
    send   the values of the batch           next call sends only the values that the server lacks
    write  position = pending

W&B stores numbered lines. A batch keeps its numbers when it is sent a second time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from paceline.errors import UserError
from paceline.runs import read
from paceline.runs.folder import RunFolder, metric_logs
from paceline.runs.metric_reader import MetricEntry
from paceline.runs.search.summaries import as_float
from paceline.runs.series import milliseconds
from paceline.system import locks
from paceline.system.files import read_json, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Param, RunTag

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
#: MLflow's limits: metrics in a request, parameters or tags in a request, lengths of a name, a parameter and a tag.
_BATCH, _PART, _NAME_LENGTH, _PARAMETER_LENGTH, _TAG_LENGTH = 1000, 100, 250, 6000, 8000
#: Characters that MLflow refuses in a name. The name must also be a normalized relative path: "a//b" and "../a" are invalid.
_NOT_IN_NAMES = re.compile(r"[^\w\-./ :]|^[./]|/(?=/|$|\.{1,2}(?:/|$))")
#: HTTP status codes below 500 after which the relay retries: 408 (timeout) and 429 (too many requests).
_PASSING = (408, 429)
#: Seconds to wait after the first error; maximum seconds to wait after repeated errors.
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class SentValue(NamedTuple):
    """A metric's value to send to MLflow or W&B. MLflow treats equal values as one."""

    name: str
    value: float
    time_ms: int
    step: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        """A key that is equal for equal values, also NaN and MLflow's infinity."""
        value = math.copysign(math.inf, self.value) if abs(self.value) >= sys.float_info.max else self.value
        return self.name, repr(value), self.time_ms, self.step


class CutError(Exception):
    """An error because a server did not answer; it may have processed the request."""


class RelayServer(Protocol):
    """A client that stores one run on a tracker's server.

    to: The server as the option `--to` names it. look_s: Seconds between two readings of the run's logs. A caller may
    repeat a call that has raised CutError.
    """

    to: str
    look_s: float

    def open(self, key: str | None) -> str:
        """Find or create the server's run with parameters and tags. Return its key.

        key: The key that an earlier call for this run returned; None for the first call.
        """

    def send(self, values: list[SentValue], line: int, *, is_doubtful: bool) -> int:
        """Store metric values on the server, and return the number of lines added.

        line: Number of lines that the server has. is_doubtful: Whether an earlier call may have stored some values.
        """

    def show_alive(self) -> None:
        """Tell the tracker's server that the run is still running."""

    def finish(self) -> None:
        """Store the state and the end time of the run on the server."""


@dataclass
class _State:
    """The content of `relays/<server>.json`: a relay's progress.

    lines: Number of lines on the server. positions, pending: Log -> offset. counts: Metric -> number of values without a step.
    """

    to: str
    key: str | None = None
    lines: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    is_done: bool = False


class MetricRelay:
    """A relay of a run to a server, in one process only."""

    def __init__(self, folder: RunFolder, server: RelayServer) -> None:
        self._folder, self._server, to = folder, server, server.to
        try:
            folder.relays.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{str(folder.relays)!r} can't be made: {error.strerror}. Ask the run's owner.") from error
        self._file = folder.relays / f"{hashlib.sha256(to.encode()).hexdigest()[:12]}.json"
        lock = locks.take(self._file.with_suffix(".lock"))
        if lock is None:
            raise UserError(f"another process relays run {folder.run_id} to {to}. Wait for its end, or end it.")
        self._lock = lock
        self._state = _State(to)
        found = read_json(self._file)
        if isinstance(found, dict) and found.get("to") == to:
            for name, value in vars(self._state).items():
                if type(found.get(name)) is type(value) or name == "key":
                    setattr(self._state, name, found.get(name))
        self._is_open = False

    def close(self) -> None:
        """Release the relay's lock, so that another process can relay the run."""
        os.close(self._lock)

    def run(self) -> None:
        """Relay metrics until the run has ended and the server has all values."""
        pause_s = _PAUSE_S
        while True:
            try:
                if self.look():
                    return
                pause_s = _PAUSE_S
            except CutError as error:
                _log.warning("%s does not answer (%s); the next try is in %.0f s", self._state.to, error, pause_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            time.sleep(self._server.look_s)

    def look(self) -> bool:
        """Send all new metric values. Return whether the run has ended.

        Raises:
            CutError: The server did not answer. The next call sends the values that the server lacks.
        """
        # Read the record before the values. If the record says that the run has ended, no values are missing then.
        record = read.record(self._folder)
        if self._state.is_done:
            return True
        if not self._is_open:
            self._state.key = self._server.open(self._state.key)
            self._keep()
            self._is_open = True
        logs = [path for paths in metric_logs(self._folder.metrics).values() for path in paths.values()]
        # First send the batch that the server has not confirmed, because its lines come first in the log.
        for path in sorted(logs, key=lambda path: path.name not in self._state.pending):
            self._pass_on(path)
        self._server.show_alive()
        if record.is_terminal:
            self._server.finish()
            self._state.is_done = True
            self._keep()
        return record.is_terminal

    def _pass_on(self, path: Path) -> None:
        state, name = self._state, path.name
        while True:
            doubtful_end = state.pending.get(name)
            counts = dict(state.counts)
            values, end = _batch(path, state.positions.get(name, 0), counts, doubtful_end)
            if end == state.positions.get(name, 0):
                return
            if values:
                if doubtful_end is None:
                    state.pending[name] = end
                    self._keep()
                state.lines += self._server.send(values, state.lines, is_doubtful=doubtful_end is not None)
            state.positions[name], state.counts = end, counts
            state.pending.pop(name, None)
            self._keep()

    def _keep(self) -> None:
        write_json(self._file, vars(self._state))


def _batch(path: Path, start: int, counts: dict[str, int], stop: int | None) -> tuple[list[SentValue], int]:
    """Return values of a metric log's next lines, and the offset after them.

    counts: Metric -> number of values without a step; updated by the call. stop: Offset to stop at, or None.
    """
    values: list[SentValue] = []
    end = start
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n") or len(values) == _BATCH or end == stop:
                break
            end += len(line)
            values.extend(_values(line, counts))
    return values, end


def _values(line: bytes, counts: dict[str, int]) -> Iterator[SentValue]:
    try:
        found = json.loads(line)
    except ValueError:
        return
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return
    entry = cast("MetricEntry", found)
    value, step, time_s = entry.get("value"), entry.get("step"), entry.get("time")
    if entry.get("kind") is not None or not isinstance(value, (int, float)):
        return
    if not isinstance(step, int):
        step = counts.get(entry["name"], 0)
        counts[entry["name"]] = step + 1
    time_ms = milliseconds(time_s) if isinstance(time_s, (int, float)) else 0
    yield SentValue(entry["name"], as_float(value), time_ms, step)


class MlflowServer:
    """A client that stores one run on an MLflow server."""

    look_s = 2.0

    def __init__(self, folder: RunFolder, uri: str, experiment: str | None = None) -> None:
        # Keep MLflow's client from retrying: it would repeat a request that the server has executed, which doubles values.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        try:
            import mlflow
        except ImportError as error:
            raise UserError("relay needs mlflow: pip install 'paceline[mlflow]'.") from error
        self.to = f"mlflow={uri}"
        self._folder, self._uri, self._experiment = folder, uri, experiment
        self._client: MlflowClient = mlflow.MlflowClient(uri)
        self._key = ""

    def open(self, key: str | None) -> str:
        self._key = key or self._call(self._find_or_create)
        self._call(self._describe)
        return self._key

    def send(self, values: list[SentValue], line: int, *, is_doubtful: bool) -> int:
        from mlflow.entities import Metric

        named = [value._replace(name=mlflow_name(value.name)) for value in values]
        new = {value.key: value for value in named}
        if is_doubtful:
            for name in {value.name for value in named}:
                for there in self._call(partial(self._client.get_metric_history, self._key, name)):
                    new.pop(SentValue(there.key, there.value, there.timestamp, there.step).key, None)
        metrics = [Metric(value.name, value.value, value.time_ms, value.step) for value in new.values()]
        if metrics:
            self._call(lambda: self._client.log_batch(self._key, metrics=metrics))
        return len(values)

    def show_alive(self) -> None:
        """Do nothing: MLflow does not expect heartbeats."""

    def finish(self) -> None:
        from paceline.trackers.mlflow import view

        self._call(self._describe)
        info = view.run(self._folder).info
        self._call(lambda: self._client.set_terminated(self._key, info.status, info.end_time))

    def _find_or_create(self) -> str:
        from paceline.trackers.mlflow import view

        run = view.run(self._folder)
        name = self._experiment or run.info.experiment_id
        there = self._client.get_experiment_by_name(name)
        place = there.experiment_id if there is not None else self._client.create_experiment(name)
        # Search for the run first: an earlier request may have created it although the server's answer was lost.
        mine = f"tags.`paceline.run_id` = '{self._folder.run_id}'"
        for found in self._client.search_runs([place], mine, max_results=1):
            return str(found.info.run_id)
        tags = {"paceline.run_id": self._folder.run_id}
        made = self._client.create_run(place, run.info.start_time, tags, run.info.run_name)
        return str(made.info.run_id)

    def _describe(self) -> None:
        from paceline.trackers.mlflow import view

        data = view.run(self._folder).data
        for params, tags in mlflow_parts(data.params, data.tags):
            self._client.log_batch(self._key, params=params, tags=tags)

    def _call(self, request: Callable[[], Result]) -> Result:
        from mlflow import MlflowException

        try:
            return request()
        except MlflowException as error:
            code = error.get_http_status_code()
            if 400 <= code < 500 and code not in _PASSING:
                raise UserError(f"{self._uri} refuses run {self._folder.run_id}: {error.message}") from error
            raise CutError(str(error.message).partition(" with exception ")[2][:200] or error.message) from error


def mlflow_name(name: str) -> str:
    """Return a name that MLflow permits for a metric, a parameter or a tag."""
    return _NOT_IN_NAMES.sub("_", name[:_NAME_LENGTH])


def mlflow_parts(params: Mapping[str, str], tags: Mapping[str, str]) -> Iterator[tuple[list[Param], list[RunTag]]]:
    """Yield a run's parameters and tags in parts that MLflow permits in one request."""
    from mlflow.entities import Param, RunTag

    named = {mlflow_name(key): value[:_PARAMETER_LENGTH] for key, value in params.items()}
    all_params = [Param(key, value) for key, value in named.items()]
    all_tags = [RunTag(mlflow_name(key), value[:_TAG_LENGTH]) for key, value in tags.items()]
    for at in range(0, max(len(all_params), len(all_tags)), _PART):
        yield all_params[at : at + _PART], all_tags[at : at + _PART]
