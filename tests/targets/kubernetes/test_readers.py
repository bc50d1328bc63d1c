"""A connection to a pod ends, whatever the pod or the API does, and connections to a service are led to its pods in turn."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest

pytest.importorskip("websockets")

from paceline.errors import EngineError
from paceline.services.listener import ConnectionRelay
from paceline.targets.kubernetes import readers
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster


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


# --- connections to the pods of a service


class Answering:
    """A WebSocket to a pod, which answers each message with the pod's name and the message."""

    def __init__(self, pod: str) -> None:
        self._pod, self._is_entered = pod, False
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        for first in (b"\0\x40\x1f", b"\1\x40\x1f"):
            self._answers.put(first)

    def send(self, data: bytes) -> None:
        self._answers.put(b"\0" + f"{self._pod}: ".encode() + data[1:])

    def __enter__(self) -> Answering:
        time.sleep(0.05)  # a thread that does not wait for this reads before it
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.put(None)

    def __iter__(self) -> Iterator[bytes]:
        assert self._is_entered, "websockets warns of a read before its context is entered"
        while (answer := self._answers.get(timeout=60)) is not None:
            yield answer


class Pods:
    """A cluster with pods to which ports can be forwarded, apart from `errors`."""

    def __init__(self, **errors: Exception) -> None:
        self._errors = errors

    def path(self, kind: str, name: str) -> str:
        return f"/{kind}/{name}"

    def websocket(self, path: str, params: dict[str, str], protocol: str) -> Answering:
        assert params == {"ports": "8000"}
        pod = path.split("/")[2]
        if pod in self._errors:
            raise self._errors[pod]
        return Answering(pod)


@contextlib.contextmanager
def forwards(*pods: str, **errors: Exception) -> Iterator[tuple[readers.PodForwards, tuple[str, int], list[str]]]:
    """Connections to a service's port that are led to pods: their forwarding, the address of the port, and what it says."""
    said: list[str] = []
    found = readers.PodForwards(cast("Cluster", Pods(**errors)), 8000, said.append)
    found.pods = pods
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = ConnectionRelay(listener)
        relay.place = found
        yield found, listener.getsockname(), said
        relay.close()


def asked(address: tuple[str, int]) -> bytes:
    # The other side may close the connection before the message is sent or read.
    with socket.create_connection(address, timeout=60) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"hello")
        return sock.recv(100)
    return b""


def test_connections_are_led_to_all_pods_in_turn() -> None:
    with forwards("a", "b") as (_, address, _):
        assert sorted(asked(address) for _ in range(4)) == [b"a: hello"] * 2 + [b"b: hello"] * 2


def test_connection_goes_to_another_pod_if_one_does_not_answer_or_is_gone() -> None:
    away = {"a": EngineError("no answer"), "b": ApiRefusedError("not found", 404)}
    with forwards("a", "b", "c", **away) as (_, address, _):
        assert {asked(address) for _ in range(4)} == {b"c: hello"}


def test_connection_waits_for_a_pod_that_answers() -> None:
    with forwards() as (found, address, _), socket.create_connection(address, timeout=60) as sock:
        sock.sendall(b"hello")
        found.pods = ["a"]
        assert sock.recv(100) == b"a: hello"


def test_connection_is_closed_with_a_reason_if_the_user_may_not_forward_ports() -> None:
    with forwards("a", a=ApiRefusedError("no portforward", 403)) as (_, address, said):
        assert [asked(address), asked(address)] == [b"", b""]
        assert said == ["a request can't reach the pods: no portforward"] * 2
