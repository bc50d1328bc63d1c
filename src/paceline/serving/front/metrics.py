"""Metrics in the text format of Prometheus (version 0.0.4), and the access log.

The counts cover all model processes, because a single process distributes the requests.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable

from paceline.serving.front.pool import Pool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Upper bounds of the histograms' buckets, in seconds.
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_FULL = 64


class LatencyHistogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> list[str]:
        buckets, total = [], 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*buckets, f"{name}_sum{{{labels}}} {self._sum:.6f}", f"{name}_count{{{labels}}} {total}"]


class Metrics:
    def __init__(self, service: str) -> None:
        self._service = service
        self._requests: Counter[tuple[str, int]] = Counter()
        self._took: defaultdict[str, LatencyHistogram] = defaultdict(LatencyHistogram)
        self._ran: defaultdict[str, LatencyHistogram] = defaultdict(LatencyHistogram)

    def count(self, path: str, status: int, seconds: float, ran_us: int | None) -> None:
        """Count a response to a request for `path`.

        seconds: The time from the request's head to the response.
        ran_us: Microseconds that the model took; None if the server answered without a model.
        """
        self._requests[path, status] += 1
        self._took[path].add(seconds)
        if ran_us is not None:
            self._ran[path].add(ran_us / 1e6)

    def text(self, pool: Pool, connections: int) -> str:
        service = f'service="{self._service}"'
        lines: list[str] = []

        def family(name: str, kind: str, text: str, values: Iterable[tuple[str, object]]) -> None:
            lines.extend((f"# HELP paceline_{name} {text}", f"# TYPE paceline_{name} {kind}"))
            lines.extend(f"paceline_{name}{{{labels}}} {value}" for labels, value in values)

        family(
            "requests_total",
            "counter",
            "Requests answered.",
            ((f'{service},path="{path}",status="{status}"', count) for (path, status), count in self._requests.items()),
        )
        for name, text, samples in (
            ("request_seconds", "From a request's head to the end of its answer.", self._took),
            ("model_seconds", "In the model; of a batch, what the whole batch took.", self._ran),
        ):
            family(name, "histogram", text, ())
            for path, histogram in samples.items():
                lines.extend(histogram.lines(f"paceline_{name}", f'{service},path="{path}"'))
        family("batches_total", "counter", "Times that a model was called.", [(service, pool.batches)])
        family("requests_waiting", "gauge", "Requests that wait for a model process.", [(service, len(pool.queue))])
        family("requests_running", "gauge", "Requests that model processes have in hand.", [(service, pool.in_hand)])
        family("connections", "gauge", "Open connections.", [(service, connections)])
        ready = sum(each.state == "ready" for each in pool.processes)
        family("model_processes_ready", "gauge", "Model processes that answer.", [(service, ready)])
        family(
            "model_process_restarts_total",
            "counter",
            "Model processes that were replaced, by reason.",
            ((f'{service},reason="{why}"', count) for why, count in pool.restarts.items()),
        )
        family(
            "model_process_resident_bytes",
            "gauge",
            "Memory of each model process.",
            ((f'{service},pid="{each.pid}"', each.resident_bytes()) for each in pool.processes),
        )
        return "\n".join(lines) + "\n"


class AccessLog:
    """A buffered access log, with a line for each request.

    fd: The file descriptor to which the log is written.
    is_on: Whether requests are logged at all.
    """

    def __init__(self, fd: int, is_on: bool) -> None:
        self._fd, self.is_on = fd, is_on
        self._lines: list[str] = []

    def add(self, method: str, path: bytes, status: int, size: int, seconds: float, request_id: bytes) -> None:
        if not self.is_on:
            return
        self._lines.append(
            f"{_stamp()} {method} {_shown(path)} {status} {size} {seconds * 1000:.3f}ms {_shown(request_id)}\n"
        )
        if len(self._lines) >= _FULL:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            text, self._lines = "".join(self._lines).encode(), []
            try:
                os.write(self._fd, text)
            except OSError:
                pass  # ignore the error: the process that read the log has ended


_second = (0, "")


def _stamp() -> str:
    global _second
    now = time.time()
    whole = int(now)
    if whole != _second[0]:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return f"{_second[1]}.{int((now - whole) * 1000):03d}Z"


def _shown(text: bytes) -> str:
    line = text.decode("latin-1")
    return line if line.isascii() and line.isprintable() else ascii(line)[1:-1]
