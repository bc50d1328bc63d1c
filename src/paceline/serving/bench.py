"""A load test of a server. Clients await each response before the next request."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from paceline.errors import ServingError
from paceline.serving.model.answers import message_of

CLIENTS = (1, 8, 32)

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The results of a load test with one number of clients.

    failures: Number of responses with another status than 2xx, plus the number of broken connections.
    per_second: Responses per second.
    p50_ms, p95_ms, p99_ms: Percentiles of the response times in milliseconds. Half of the requests took at most `p50_ms`.
    """

    clients: int
    requests: int
    failures: int
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def bench(
    url: str,
    body: bytes,
    *,
    clients: Sequence[int] = CLIENTS,
    seconds: float = 5.0,
    headers: Mapping[str, str] | None = None,
    cafile: str | None = None,
) -> list[BenchResult]:
    """Test a server with POST requests of `body`, by each number of clients in turn.

    seconds: Duration of the test with each number of clients.
    headers: Headers of the requests, such as Authorization.
    cafile: File with the CA certificate of the server; None uses the certificates that the system trusts.

    All clients run in this process. Above several thousand requests a second, the clients are slower than the server.

    Raises:
        ServingError: The server can't be reached, or its first response is an error.
    """
    target = _Target.of(url, body, headers or {}, cafile)

    async def all_of_them() -> list[BenchResult]:
        await _try(target, url)
        return [await _measure(target, count, seconds) for count in clients]

    try:
        import uvloop
    except ImportError:
        return asyncio.run(all_of_them())
    loop = uvloop.new_event_loop()
    try:
        results: list[BenchResult] = loop.run_until_complete(all_of_them())
        return results
    finally:
        loop.close()


def table(results: Sequence[BenchResult]) -> list[list[str]]:
    """Return table rows: a header, and the results for each number of clients."""
    rows = [["CLIENTS", "REQ/S", "P50 MS", "P95 MS", "P99 MS", "REQUESTS", "FAILURES"]]
    for each in results:
        times = [f"{value:.2f}" for value in (each.p50_ms, each.p95_ms, each.p99_ms)]
        rows.append([str(each.clients), f"{each.per_second:.0f}", *times, str(each.requests), str(each.failures)])
    return rows


def picture(results: Sequence[BenchResult], path: Path, title: str = "") -> None:
    """Draw a chart of requests per second and latencies by number of clients."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ServingError("a picture needs matplotlib. Install it: pip install matplotlib.") from error
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    rate, times = figure.subplots(1, 2)
    places = range(len(results))
    labels = [str(each.clients) for each in results]
    rate.bar(places, [each.per_second for each in results], color="#4c72b0")
    rate.set_ylabel("requests a second")
    for name, marker in (("p50", "o"), ("p95", "s"), ("p99", "^")):
        times.plot(places, [getattr(each, f"{name}_ms") for each in results], marker=marker, label=name)
    times.set_ylabel("milliseconds")
    times.set_yscale("log")
    times.legend()
    for axes in (rate, times):
        axes.set_xticks(places, labels)
        axes.set_xlabel("clients")
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


@dataclass(frozen=True)
class _Target:
    host: str
    port: int
    context: ssl.SSLContext | None
    request: bytes

    @classmethod
    def of(cls, url: str, body: bytes, headers: Mapping[str, str], cafile: str | None) -> _Target:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServingError(f"{url!r} is not an address of a server. Write http://HOST:PORT/score.")
        context = ssl.create_default_context(cafile=cafile) if parts.scheme == "https" else None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [
            f"POST {target} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        port = parts.port or (443 if context else 80)
        return cls(parts.hostname, port, context, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


class _Client(asyncio.Protocol):
    def __init__(self, target: _Target, until: float) -> None:
        self._asked, self._until = target, until
        self.times: list[float] = []
        self.failures = 0
        self.first: tuple[int, bytes] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._got = b""
        self._need = 0
        self._closes = False
        self._began = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._got, self._need = b"", 0
        self._began = time.perf_counter()
        self._transport.write(self._asked.request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._need:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._got[: end + 2]
            length = _LENGTH.search(head)
            self._closes = bool(_CLOSES.search(head))
            self._need = end + 4 + (int(length[1]) if length else 0)
        if len(self._got) < self._need:
            return
        now = time.perf_counter()
        self.times.append(now - self._began)
        status = int(self._got[9:12])
        if not 200 <= status < 300:
            self.failures += 1
        if self.first is None:
            self.first = (status, self._got.partition(b"\r\n\r\n")[2])
        if now < self._until and not self._closes:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._began and len(self._got) < max(1, self._need):
            self.failures += 1
        if not self.done.done():
            self.done.set_result(None)


async def _one(target: _Target, until: float, found: list[_Client]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        client = _Client(target, until)
        found.append(client)
        try:
            await loop.create_connection(lambda client=client: client, target.host, target.port, ssl=target.context)
        except OSError:
            client.failures += 1
            await asyncio.sleep(0.05)
        else:
            await client.done
        if time.perf_counter() >= until:
            return


async def _try(target: _Target, url: str) -> None:
    clients: list[_Client] = []
    await _one(target, 0.0, clients)
    first = clients[0].first
    if first is None:
        raise ServingError(f"there is no answer from {url}. Is it being served?")
    status, body = first
    if not 200 <= status < 300:
        raise ServingError(f"{url} answers {status}: {message_of(body)}")


async def _measure(target: _Target, clients: int, seconds: float) -> BenchResult:
    found: list[_Client] = []
    began = time.perf_counter()
    await asyncio.gather(*(_one(target, began + seconds, found) for _ in range(clients)))
    took = time.perf_counter() - began
    times = sorted(each for client in found for each in client.times)

    def part(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))] * 1000 if times else float("nan")

    return BenchResult(
        clients=clients,
        requests=len(times),
        failures=sum(client.failures for client in found),
        per_second=len(times) / took,
        p50_ms=part(0.50),
        p95_ms=part(0.95),
        p99_ms=part(0.99),
    )
