"""A client of the cluster's API waits for an API server that is away, and for its Roles."""

from __future__ import annotations

import ssl
from typing import Any, cast

import pytest

pytest.importorskip("lightkube")

import httpx2
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

from paceline.errors import EngineError
from paceline.targets.kubernetes import api


def cluster_without_a_network() -> api.Cluster:
    return object.__new__(api.Cluster)


def test_api_request_refused_with_403_right_after_a_failed_connection_is_retried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api.time, "sleep", lambda seconds: None)
    answers: list[Exception | str] = [EngineError("away"), api.ApiRefusedError("forbidden", 403), "created"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert cluster_without_a_network().patiently(call, 60.0) == "created"


@pytest.mark.parametrize("code", [403, 409, 422])
def test_api_request_refused_by_a_reachable_server_is_not_retried(code: int):
    def call() -> str:
        raise api.ApiRefusedError("no", code)

    with pytest.raises(api.ApiRefusedError):
        cluster_without_a_network().patiently(call, 60.0)


class Requests:
    """An HTTP client whose login is renewed after HTTP 401, and which gets these answers."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self._answers = list(answers)
        self.auth = api._Login("compute target 'k8s'", {"command": "login"})
        self.asked: list[str] = []
        self.auth._ask = self._ask  # type: ignore[method-assign]

    def _ask(self) -> None:
        self.auth._status = {"token": f"token-{len(self.asked)}"}
        self.asked.append("login")

    def build_request(self, method: str, path: str, **_: Any) -> httpx2.Request:
        return httpx2.Request(method, f"https://cluster{path}")

    def request(self, *_: Any, **__: Any) -> httpx2.Response:
        return self._answers.pop(0)


def cluster_with(requests: Requests) -> api.Cluster:
    cluster = cluster_without_a_network()
    cluster.title, cluster.server, cluster._proxy = "compute target 'k8s'", "https://cluster", None
    cluster._http = cast("httpx2.Client", requests)
    cluster._tls = ssl.create_default_context()
    return cluster


@pytest.mark.parametrize(
    ("told", "slept"), [("3", 3.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0), ("60", 5.0)], ids=["s", "date", "long"]
)
def test_busy_api_is_asked_again_after_the_time_that_it_names(
    monkeypatch: pytest.MonkeyPatch, told: str, slept: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(api.time, "sleep", pauses.append)
    busy = httpx2.Response(429, headers={"Retry-After": told})

    assert cluster_with(Requests(busy, httpx2.Response(200))).request("GET", "/version", {}).status_code == 200

    assert pauses == [slept]


@pytest.mark.parametrize("expired", [1, 2])
def test_websocket_renews_an_expired_login_once(monkeypatch: pytest.MonkeyPatch, expired: int) -> None:
    sent: list[str] = []

    def connect(url: str, *, additional_headers: Any, **_: Any) -> str:
        sent.append(dict(additional_headers)["Authorization"])
        if len(sent) <= expired:
            raise InvalidStatus(Response(401, "Unauthorized", Headers()))
        return url

    monkeypatch.setattr(api, "connect", connect)
    cluster = cluster_with(Requests())
    if expired == 1:
        assert cluster.websocket("/a", {}, "p") == "wss://cluster/a"
    else:
        with pytest.raises(api.ApiRefusedError, match="does not know this user"):
            cluster.websocket("/a", {}, "p")

    assert sent == ["Bearer token-0", "Bearer token-1"]
