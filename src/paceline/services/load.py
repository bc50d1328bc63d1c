"""Measure a service's load from its server's metrics, and list its model processes."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypedDict, cast

from paceline.errors import ServiceError
from paceline.runs.metric_reader import parsed
from paceline.services import client, keys
from paceline.services.folder import ServiceFolder
from paceline.services.record import ServiceRecord
from paceline.serving.api import read_state
from paceline.system.files import gone_is_fine, replacing, stamp_of

_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
#: Minimum seconds between two samples; maximum number of samples to keep, which covers half an hour.
_PAUSE_S, _MOST = 1.5, 1200
#: Seconds between two points of the history; and maximum size of its file in bytes. Half of this size holds one day.
HISTORY_S, _HISTORY_BYTES = 30.0, 1 << 20

_LINE = re.compile(r"paceline_(?P<name>\w+)\{(?P<labels>[^{}]*)\} (?P<value>[-+.\w]+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
#: Operations that call the model. Requests to other paths, such as health checks, don't count.
_OPERATIONS = ("/score", "infer")


class LoadPoint(TypedDict):
    """The rates and latencies of a service's requests between two samples.

    Latencies are None if no request ended in between. `waiting` and `running` count requests at the second sample.
    """

    t: float
    requests_per_s: float
    errors_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    waiting: float
    running: float


@dataclass(frozen=True, kw_only=True)
class ServerSample:
    """The request counters of a server at one time. A new server's counters are 0.

    buckets: Upper bound of the latency in seconds -> number of requests up to this bound.
    """

    at: float
    requests: float = 0.0
    errors: float = 0.0
    buckets: Mapping[float, float] = field(default_factory=dict)
    waiting: float = 0.0
    running: float = 0.0
    ready: int = 0
    restarts: int = 0
    memory_bytes: Mapping[int, int] = field(default_factory=dict)


class LoadHistory:
    """The writer of `load.jsonl`, a history of request rates and latencies."""

    def __init__(self, folder: ServiceFolder) -> None:
        self._folder = folder
        self._before: ServerSample | None = None
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def look(self, record: ServiceRecord) -> None:
        """Sample the server's counters every 30 s, in a thread."""
        if time.monotonic() >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = time.monotonic() + HISTORY_S
            self._thread = threading.Thread(target=self._add, args=(record,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait at most two seconds for a sample in progress."""
        if self._thread is not None:
            self._thread.join()

    def _add(self, record: ServiceRecord) -> None:
        try:
            now = _sample(self._folder, record)
        except (OSError, ServiceError):
            return
        before, self._before = self._before, now
        if before is None or now.at <= before.at:
            return
        path = self._folder.load
        with gone_is_fine():
            with open(path, "ab") as file:
                # Begin with a newline, in case a full disk has cut the last line short.
                file.write(b"\n" + json.dumps(point(before, now), separators=(",", ":")).encode())
            if path.stat().st_size > _HISTORY_BYTES:
                rest = path.read_bytes()[-_HISTORY_BYTES // 2 :].partition(b"\n")[2]
                with replacing(path) as beside:
                    beside.write_bytes(rest)


def read_history(folder: ServiceFolder) -> list[LoadPoint]:
    """Return a service's past request rates and latencies (`load.jsonl`), oldest first."""
    return _history_at(folder, stamp_of(folder.load))


# Cache the points, because a service's page reads the history every two seconds.
@lru_cache(maxsize=16)
def _history_at(folder: ServiceFolder, stamp: object) -> list[LoadPoint]:
    try:
        data = folder.load.read_bytes()[-2 * _HISTORY_BYTES :]
    except OSError:
        return []
    return [cast("LoadPoint", one) for one in parsed(data) if _is_point(one)]


def _is_point(value: object) -> bool:
    if not isinstance(value, dict) or LoadPoint.__annotations__.keys() - value.keys():
        return False
    numbers = [value[name] for name in LoadPoint.__annotations__ if value[name] is not None or not name.endswith("_ms")]
    return all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)


class ServiceLoad:
    """Recent request rates of a service, sampled while a user watches them."""

    def __init__(self, folder: ServiceFolder) -> None:
        self._folder = folder
        self._samples: deque[ServerSample] = deque(maxlen=_MOST)
        self._next = 0.0
        self.error: str | None = None

    @property
    def last(self) -> ServerSample | None:
        """The newest sample of the server's counters, or None before the first."""
        return self._samples[-1] if self._samples else None

    def points(self, record: ServiceRecord) -> list[LoadPoint]:
        """Return request rates and latencies, oldest first.

        First take a sample, unless the last one is recent. Times without samples have points from `load.jsonl`.
        """
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PAUSE_S
            try:
                self._samples.append(_sample(self._folder, record))
                self.error = None
            except (OSError, ServiceError) as error:
                self.error = str(getattr(error, "reason", error))
        pairs = zip(list(self._samples), list(self._samples)[1:], strict=False)
        # Skip pairs of samples that are far apart in time: no process took samples between the two.
        fine = [point(before, now) for before, now in pairs if 0 < now.at - before.at < HISTORY_S]
        times = [one["t"] for one in fine]

        def is_fine(at: float) -> bool:
            place = bisect_right(times, at)
            return place > 0 and times[place - 1] > at - HISTORY_S

        coarse = [one for one in read_history(self._folder) if not is_fine(one["t"])]
        return sorted([*coarse, *fine], key=lambda one: one["t"])


def _sample(folder: ServiceFolder, record: ServiceRecord) -> ServerSample:
    if folder.cluster.exists() and (record.workers or 1) > 1:
        raise ServiceError("a request for metrics reaches one of the service's pods, which doesn't know the others.")
    return parse(get(folder, record, "/metrics").decode("utf-8", "replace"), time.time())


def get(folder: ServiceFolder, record: ServiceRecord, path: str) -> bytes:
    """Return the response of the service's server to a GET request for `path`.

    The request has the service's key, if the service has keys.

    Raises:
        ServiceError: The service has no address yet, or the keys can't be read.
        OSError: The server does not answer within two seconds.
    """
    if record.url is None:
        raise ServiceError(f"service {record.name!r} is {record.state} and has no address yet.")
    return client.get(
        f"{record.url}{path}",
        key=keys.read(folder)[0] if record.has_keys else None,
        timeout_s=_TIMEOUT_S,
        certificate=record.tls_cert,
        most_bytes=_MOST_BYTES,
    )


def parse(text: str, at: float) -> ServerSample:
    """Return the sample in a server's metrics text, read at the time `at`.

    Examples:
        >>> parse('paceline_requests_total{path="/score",status="200"} 7', 0.0).requests
        7.0
    """
    sums: dict[str, float] = {}
    buckets: dict[float, float] = {}
    memory: dict[int, int] = {}
    for name, labels, value in _values(text):
        if labels.get("path", _OPERATIONS[0]) not in _OPERATIONS:
            continue
        if name == "request_seconds_bucket":
            bound = _number(labels.get("le", "").replace("+Inf", "inf"))
            buckets[bound] = buckets.get(bound, 0.0) + value
        elif name == "model_process_resident_bytes" and labels.get("pid", "").isdecimal():
            memory[int(labels["pid"])] = int(value)
        else:
            sums[name] = sums.get(name, 0.0) + value
            if name == "requests_total" and labels.get("status", "")[:1] in ("4", "5"):
                sums["errors"] = sums.get("errors", 0.0) + value
    return ServerSample(
        at=at,
        requests=sums.get("requests_total", 0.0),
        errors=sums.get("errors", 0.0),
        buckets=dict(sorted(item for item in buckets.items() if not math.isnan(item[0]))),
        waiting=sums.get("requests_waiting", 0.0),
        running=sums.get("requests_running", 0.0),
        ready=int(sums.get("model_processes_ready", 0)),
        restarts=int(sums.get("model_process_restarts_total", 0)),
        memory_bytes=memory,
    )


def point(before: ServerSample, now: ServerSample) -> LoadPoint:
    """Return request rates and latencies between two samples of a server's counters."""
    if now.requests < before.requests:
        # If the counters have decreased, the server was restarted between the two samples.
        before = ServerSample(at=before.at)
    seconds = now.at - before.at
    counts = {bound: count - before.buckets.get(bound, 0.0) for bound, count in now.buckets.items()}
    p50, p95, p99 = (quantile(counts, part) for part in (0.5, 0.95, 0.99))
    return {
        "t": now.at,
        "requests_per_s": (now.requests - before.requests) / seconds,
        "errors_per_s": max(0.0, now.errors - before.errors) / seconds,
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "waiting": now.waiting,
        "running": now.running,
    }


def quantile(counts: Mapping[float, float], part: float) -> float | None:
    """Return a quantile of latencies in milliseconds; None if there was no request.

    counts: Upper bound in seconds -> number of requests up to this bound, in the order of the bounds.
    part: The quantile, such as 0.95.

    As in Prometheus, the result is interpolated within a bucket.

    Examples:
        >>> quantile({0.1: 0, 0.2: 10, float("inf"): 10}, 0.5)
        150.0
    """
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= part * total:
            inside = (part * total - below) / (count - below) if count > below else 1.0
            return 1000 * (low if math.isinf(bound) else low + (bound - low) * inside)
        low, below = bound, count
    return 1000 * low


@dataclass(frozen=True, kw_only=True)
class ModelReplica:
    """A model process of a service on this machine."""

    pid: int
    state: str
    revision: str
    error: str
    memory_bytes: int | None


def replicas(folder: ServiceFolder, sample: ServerSample | None) -> list[ModelReplica]:
    """Return the model processes of a server on this machine.

    sample: The newest sample, from which the memory of each process comes; None if unknown.
    """
    state = read_state(folder.server)
    memory: Mapping[int, int] = sample.memory_bytes if sample is not None else {}
    found: object = state.get("workers") if state is not None else ()
    return [
        ModelReplica(
            pid=one["pid"],
            state=str(one.get("state")),
            # The supervisor tags each configuration with the revision's number, a dot and a counter. Keep the number.
            revision=str(one.get("revision")).partition(".")[0],
            error=str(one.get("error") or ""),
            memory_bytes=memory.get(one["pid"]),
        )
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict) and isinstance(one.get("pid"), int)
    ]


def example_input(folder: ServiceFolder, record: ServiceRecord) -> str:
    """Return an example request for the service as JSON, or "".

    The example is from the service's OpenAPI document.
    """
    try:
        document: object = json.loads(get(folder, record, "/openapi.json"))
    except (OSError, ValueError, ServiceError):
        return ""
    for name in ("components", "schemas", "ServiceInput"):
        document = document.get(name) if isinstance(document, dict) else None
    example = _example(document, 0)
    return "" if example in (None, {}) else json.dumps(example, ensure_ascii=False)


def _example(schema: object, depth: int) -> object:
    """Return the example of a JSON Schema, or build an example from its parts."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    if "example" in schema:
        return schema["example"]
    properties = schema.get("properties")
    if isinstance(properties, dict):
        return {name: _example(part, depth + 1) for name, part in properties.items()}
    if schema.get("type") == "array":
        return [_example(schema.get("items"), depth + 1)]
    zeros: dict[object, object] = {"number": 0.0, "integer": 0, "string": "", "boolean": False}
    return zeros.get(schema.get("type"))


def _values(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        found = _LINE.fullmatch(line.strip())
        if found is not None and math.isfinite(value := _number(found["value"])):
            yield found["name"], dict(_LABEL.findall(found["labels"])), value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
