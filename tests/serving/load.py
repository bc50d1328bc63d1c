"""Clients that call a server again and again while something happens to it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from tests.serving.servers import PATIENCE_S, Server


class Load:
    """outcomes: of each request the status, or "refused" where no connection could be made, or the error's class. bodies: of
    those with status 200."""

    def __init__(self, server: Server, clients: int, body: Any) -> None:
        self.outcomes: Counter[Any] = Counter()
        self.bodies: Counter[str] = Counter()
        self._url, self._body = server.url, body
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(clients)]

    def _call(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._is_over.is_set():
                text = ""
                try:
                    answer = client.post("/score", json=self._body)
                    outcome: Any = answer.status_code
                    text = answer.text if outcome == 200 else ""
                except httpx.ConnectError:
                    outcome = "refused"
                except httpx.HTTPError as error:
                    outcome = type(error).__name__
                with self._lock:
                    self.outcomes[outcome] += 1
                    if outcome == 200:
                        self.bodies[text] += 1
                if outcome == "refused":
                    return

    def wait_for(self, count: int) -> None:
        """Until so many more requests have been answered well."""
        import time

        wanted = self.outcomes[200] + count
        deadline = time.monotonic() + PATIENCE_S
        while self.outcomes[200] < wanted:
            assert time.monotonic() < deadline, self.outcomes
            time.sleep(0.01)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def load(server: Server, clients: int = 8, body: Any = 1) -> Iterator[Load]:
    made = Load(server, clients, body)
    made.start()
    try:
        yield made
    finally:
        made.end()
