"""The load of a service, from the metrics that its server reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.services import load
from paceline.services.folder import ServiceFolder
from paceline.services.record import ServiceRecord
from tests.ui.conftest import HOSTILE


def text(requests: int, errors: int = 0, fast: int = 0, slow: int = 0) -> str:
    return f"""# TYPE paceline_requests_total counter
paceline_requests_total{{service="s",path="/score",status="200"}} {requests - errors}
paceline_requests_total{{service="s",path="/score",status="500"}} {errors}
paceline_requests_total{{service="s",path="other",status="404"}} 900
paceline_request_seconds_bucket{{service="s",path="/score",le="0.1"}} {fast}
paceline_request_seconds_bucket{{service="s",path="/score",le="0.2"}} {fast + slow}
paceline_request_seconds_bucket{{service="s",path="/score",le="+Inf"}} {fast + slow}
paceline_requests_waiting{{service="s"}} 3
paceline_model_processes_ready{{service="s"}} 2
paceline_model_process_resident_bytes{{service="s",pid="12"}} 4096
"""


def test_load_of_a_service_has_rates_and_latencies_between_two_samples() -> None:
    before, now = load.parse(text(100, 5, fast=100), 10.0), load.parse(text(120, 7, fast=100, slow=20), 20.0)
    point = load.point(before, now)
    assert (point["requests_per_s"], point["errors_per_s"], point["waiting"]) == (2.0, 0.2, 3.0)
    assert [round(point[name] or 0) for name in ("p50_ms", "p95_ms", "p99_ms")] == [150, 195, 199]
    assert now.memory_bytes == {12: 4096}
    assert now.ready == 2
    quiet = load.point(now, load.parse(text(120, 7, fast=100, slow=20), 30.0))
    assert (quiet["requests_per_s"], quiet["p50_ms"]) == (0.0, None)


def test_load_counters_of_a_restarted_server_start_at_zero() -> None:
    point = load.point(load.parse(text(100), 10.0), load.parse(text(4, fast=4), 12.0))
    assert point["requests_per_s"] == 2.0
    assert point["p50_ms"] == 50.0


@pytest.mark.parametrize(
    "body", ["", HOSTILE, "paceline_requests_total{} nan", 'paceline_request_seconds_bucket{le="x"} 1', "\x00" * 100]
)
def test_malformed_metrics_text_gives_empty_counts(body: str) -> None:
    sample = load.parse(body, 1.0)
    assert (sample.requests, sample.buckets) == (0.0, {})


def test_service_without_an_address_reports_why_it_has_no_load(tmp_path: Path) -> None:
    watched = load.ServiceLoad(ServiceFolder(tmp_path))
    assert watched.points(ServiceRecord(name="digits", state="Stopped")) == []
    assert watched.error == "service 'digits' is Stopped and has no address yet."


def test_load_history_stores_a_point_every_30_seconds_and_its_file_size_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, counts = ServiceFolder(tmp_path), iter(range(0, 10**6, 60))
    clock = [1000.0]
    monkeypatch.setattr(load, "get", lambda *_: text(next(counts)).encode())
    monkeypatch.setattr(load.time, "time", lambda: clock[0])
    monkeypatch.setattr(load, "HISTORY_S", 30.0)
    monkeypatch.setattr(load, "_PAUSE_S", 0.0)
    history, record = load.LoadHistory(folder), ServiceRecord(name="digits", state="Healthy")

    def pass_s(seconds: float, does: Callable[[], object]) -> None:
        clock[0] += seconds
        does()

    def add() -> None:
        history._next = 0.0
        history.look(record)
        history.close()

    add()
    for _ in range(3):
        pass_s(30, add)
    folder.load.write_bytes(folder.load.read_bytes() + b'\n{"t": 1e3, "requests_per_s": "many"}\n[1]\n{"t": 107')
    pass_s(30, add)
    assert [(one["t"], one["requests_per_s"]) for one in load.read_history(folder)] == [
        (1030.0, 2.0),
        (1060.0, 2.0),
        (1090.0, 2.0),
        (1120.0, 2.0),
    ]
    watched = load.ServiceLoad(folder)
    watched.points(record)
    pass_s(2, lambda: watched.points(record))
    pass_s(28, add)
    assert [one["t"] for one in watched.points(record)] == [1030.0, 1060.0, 1090.0, 1120.0, 1122.0, 1150.0]
    monkeypatch.setattr(load, "_HISTORY_BYTES", 2000)
    for _ in range(100):
        pass_s(30, add)
        assert folder.load.stat().st_size <= 2000
    assert load.read_history(folder)[-1]["t"] == clock[0]
    assert len(load.read_history(folder)) > 4


def test_replicas_are_read_from_the_server_state_file_without_its_invalid_entries(tmp_path: Path) -> None:
    folder = ServiceFolder(tmp_path)
    assert load.replicas(folder, None) == []
    folder.server.mkdir()
    good = {"pid": 12, "state": "ready", "error": None, "revision": "3.7"}
    (folder.server / "server.json").write_text(json.dumps({"workers": [good, {"pid": "x"}, 7]}))
    (one,) = load.replicas(folder, load.parse(text(1), 1.0))
    assert (one.pid, one.state, one.revision, one.error, one.memory_bytes) == (12, "ready", "3", "", 4096)
    (folder.server / "server.json").write_text('{"workers": 3}')
    assert load.replicas(folder, None) == []


def test_example_request_of_a_service_is_made_from_the_types_in_its_openapi_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            "method": {"type": "string", "example": "predict"},
        },
    }
    document: object = {"components": {"schemas": {"ServiceInput": schema}}}
    monkeypatch.setattr(load, "get", lambda *_: json.dumps(document).encode())
    record = ServiceRecord(name="digits")
    assert load.example_input(ServiceFolder(tmp_path), record) == '{"rows": [[0.0]], "method": "predict"}'
    for without in ({}, [], {"components": {"schemas": {"ServiceInput": {"type": "object", "example": {}}}}}):
        document = without
        assert load.example_input(ServiceFolder(tmp_path), record) == ""
