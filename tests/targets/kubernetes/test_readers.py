"""A connection to a pod ends, whatever the pod or the API does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

pytest.importorskip("websockets")

from paceline.errors import EngineError
from paceline.targets.kubernetes import readers
from paceline.targets.kubernetes.api import Cluster


class Opened:
    """A WebSocket that gives some messages, and then nothing or its end."""

    title = "compute target 'k8s'"

    def __init__(self, *messages: bytes, ends: bool) -> None:
        self._messages, self._ends, self._closed = messages, ends, threading.Event()

    def path(self, kind: str, name: str) -> str:
        return f"/{kind}/{name}"

    def websocket(self, path: str, params: dict[str, str], protocol: str) -> Opened:
        return self

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def __iter__(self) -> Iterator[bytes]:
        yield from self._messages
        if not self._ends:
            self._closed.wait(30)

    def send(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize(
    "opened",
    [Opened(b"\0\0\0", b"\1\0\0", b"", b"", ends=True), Opened(b"\0\0\0", ends=False)],
    ids=["empty messages", "silence"],
)
def test_connection_to_a_pod_that_does_not_prove_its_key_is_refused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_SILENCE_S", 1)

    with pytest.raises(EngineError, match="pod p does not answer at port 1"):
        readers.connect(cast("Cluster", opened), "p", 1, "00" * 32)
