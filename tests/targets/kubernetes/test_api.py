"""A client of the cluster's API waits for an API server that is away, and for its Roles."""

from __future__ import annotations

import pytest

pytest.importorskip("lightkube")

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
