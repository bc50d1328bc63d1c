"""Connections to a service's socket are led to its pods in turn, and wait for a pod that answers."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from typing import cast

import pytest

pytest.importorskip("websockets")

from paceline.errors import EngineError
from paceline.targets.kubernetes import forward
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster


class Answering:
    """A WebSocket to a pod, which answers each message with the pod's name and the message."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        for first in (b"\0\x40\x1f", b"\1\x40\x1f"):
            self._answers.put(first)

    def send(self, data: bytes) -> None:
        self._answers.put(b"\0" + f"{self._pod}: ".encode() + data[1:])

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.put(None)

    def __iter__(self) -> Iterator[bytes]:
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
def forwards(*pods: str, **errors: Exception) -> Iterator[tuple[forward.PodForwards, list[str]]]:
    said: list[str] = []
    found = forward.PodForwards(cast("Cluster", Pods(**errors)), 8000, said.append)
    found.pods = pods
    yield found, said
    found.close()


def asked(found: forward.PodForwards) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(found.path)
        # The other side may close the connection before the message is sent or read.
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"hello")
            return sock.recv(100)
    return b""


def test_connections_are_led_to_all_pods_in_turn() -> None:
    with forwards("a", "b") as (found, _):
        assert sorted(asked(found) for _ in range(4)) == [b"a: hello"] * 2 + [b"b: hello"] * 2


def test_connection_goes_to_another_pod_if_one_does_not_answer_or_is_gone() -> None:
    with forwards("a", "b", "c", a=EngineError("no answer"), b=ApiRefusedError("not found", 404)) as (found, _):
        assert {asked(found) for _ in range(4)} == {b"c: hello"}


def test_connection_waits_for_a_pod_that_answers() -> None:
    with forwards() as (found, _), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(found.path)
        sock.sendall(b"hello")
        found.pods = ["a"]
        assert sock.recv(100) == b"a: hello"


def test_connection_is_closed_with_a_reason_if_the_user_may_not_forward_ports() -> None:
    with forwards("a", a=ApiRefusedError("no portforward", 403)) as (found, said):
        assert [asked(found), asked(found)] == [b"", b""]
        assert said == ["a request can't reach the pods: no portforward"] * 2
