"""The relay passes each value of a run to an MLflow server once, after any cut or kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.export import relay as verb
from paceline.errors import UserError
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.trackers.relay import CutError, MetricRelay, MlflowServer
from tests.helpers import make_job, make_run


class Server(ThreadingHTTPServer):
    """MLflow's REST API over lists. Like MLflow's file store it appends everything, also a second time.

    cut: kinds of requests whose connection breaks: "before" or "after" they count, or "half" of a batch.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.params: dict[str, str] = {}
        self.cut: list[tuple[str, str]] = []
        self.requests: Counter[str] = Counter()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def values(self) -> Counter[tuple[str, int, str]]:
        return Counter((one["key"], int(one["step"]), str(one["value"])) for one in self.metrics)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self._serve(parts.path, dict(urllib.parse.parse_qsl(parts.query)))

    def do_POST(self) -> None:
        self._serve(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *words: object) -> None:
        pass

    def _serve(self, path: str, body: dict[str, Any]) -> None:
        kind = path.partition("/mlflow/")[2]
        self.server.requests[kind] += 1
        how = self.server.cut.pop(0)[1] if self.server.cut and self.server.cut[0][0] == kind else ""
        if how == "half":
            body = {**body, "metrics": body.get("metrics", [])[: len(body.get("metrics", [])) // 2]}
        code, answer = (200, {}) if how == "before" else self._answer(kind, body)
        if how:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, kind: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        server = self.server
        match kind:
            case "experiments/get-by-name":
                name = body["experiment_name"]
                if name not in server.experiments:
                    return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
                return 200, {"experiment": {"experiment_id": server.experiments[name], "name": name}}
            case "experiments/create":
                server.experiments[body["name"]] = str(len(server.experiments) + 1)
                return 200, {"experiment_id": server.experiments[body["name"]]}
            case "runs/search":
                return 200, {"runs": server.runs}
            case "runs/create":
                info = {"run_id": f"r{len(server.runs)}", "experiment_id": body["experiment_id"], "status": "RUNNING"}
                server.runs.append({"info": info, "data": {"tags": body["tags"]}})
                return 200, {"run": server.runs[-1]}
            case "runs/get":
                return 200, {"run": server.runs[0]}
            case "runs/log-batch":
                if any(one["key"] == "refused" for one in body.get("metrics", [])):
                    return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such name"}
                server.metrics += body.get("metrics", [])
                server.params.update({one["key"]: one["value"] for one in body.get("params", [])})
                return 200, {}
            case "metrics/get-history":
                return 200, {"metrics": [one for one in server.metrics if one["key"] == body["metric_key"]]}
            case "runs/update":
                server.runs[0]["info"]["status"] = body["status"]
                return 200, {"run_info": server.runs[0]["info"]}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": kind}


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunFolder, MetricLog]]:
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, job=make_job(arguments=("--lr", "0.1")))
    log = MetricLog(folder.metric_log(0))
    yield folder, log
    with contextlib.suppress(OSError):
        os.close(fd)


def look(relay: MetricRelay) -> bool:
    """Look until the server has answered."""
    for _ in range(20):
        with contextlib.suppress(CutError):
            return relay.look()
    raise AssertionError("cut 20 times")


def complete(folder: RunFolder) -> None:
    store.change(folder, store.stored(folder), states.COMPLETED, ended_utc="2026-11-28T12:00:00.000Z", exit_code=0)


def test_relay_of_a_running_run_sends_its_values_and_later_its_end(
    server: Server, run: tuple[RunFolder, MetricLog]
) -> None:
    folder, log = run
    relay = MetricRelay(folder, MlflowServer(folder, server.uri))
    log.scalar("loss", 1.0, 0, 12.5)
    log.scalar("free", 5, None, 12.5)
    log.scalar("text", "warm", 0)
    log.scalar("odd name!", float("nan"), 3, 13.0)
    assert not look(relay)
    MetricLog(folder.metric_log(1)).scalar("loss", 2.0, 0, 12.6)
    log.scalar("free", 6)
    assert not look(relay)
    assert not look(relay)
    expected = [("loss", 0, "1.0"), ("free", 0, "5.0"), ("odd name_", 3, "nan"), ("free", 1, "6.0"), ("loss", 0, "2.0")]
    assert Counter((name, step, value.lower()) for name, step, value in server.values().elements()) == Counter(expected)
    assert server.params == {"lr": "0.1"}
    assert list(server.experiments) == ["digits"]
    complete(folder)
    assert look(relay)
    assert server.runs[0]["info"]["status"] == "FINISHED"
    # A relay that is started again has nothing to send.
    relay.close()
    before = server.requests.copy()
    assert MetricRelay(folder, MlflowServer(folder, server.uri)).look()
    assert server.requests == before


def test_value_with_an_impossible_time_is_sent_with_time_zero(server: Server, run: tuple[RunFolder, MetricLog]) -> None:
    folder, _ = run
    folder.metric_log(0).write_text(f'{{"name": "loss", "value": 1.0, "time": {10**400}, "step": 0}}\n')
    assert not look(MetricRelay(folder, MlflowServer(folder, server.uri)))
    assert [(one["key"], int(one["timestamp"])) for one in server.metrics] == [("loss", 0)]


@pytest.mark.parametrize("how", ["before", "after", "half"])
@pytest.mark.parametrize("kind", ["experiments/create", "runs/create", "runs/log-batch", "runs/update"])
def test_relay_sends_each_value_once_although_the_connection_breaks(
    server: Server, run: tuple[RunFolder, MetricLog], kind: str, how: str
) -> None:
    folder, log = run
    relay = MetricRelay(folder, MlflowServer(folder, server.uri))
    for step in range(5):
        log.scalar("loss", step / 2, step)
    if kind == "runs/log-batch":
        look(relay)  # this sends the parameters and the tags
        for step in range(5, 10):
            log.scalar("loss", step / 2, step)
    # A request that the server has received is not repeated, so its connection can be broken only once.
    server.cut = [(kind, how)] * (1 if how == "after" or kind != "runs/log-batch" else 2)
    if kind == "runs/update":
        complete(folder)
    look(relay)
    look(relay)
    assert server.cut == []
    assert server.values() == Counter(
        ("loss", step, str(step / 2)) for step in range(10 if kind == "runs/log-batch" else 5)
    )
    assert len(server.runs) == 1


KILLED = """
import sys
from pathlib import Path
from paceline.runs.folder import RunFolder
from paceline.trackers.relay import MetricRelay, MlflowServer
folder = RunFolder(Path(sys.argv[1]))
MetricRelay(folder, MlflowServer(folder, sys.argv[2])).look()
"""


def test_killed_relay_resumes_and_sends_each_value_once(server: Server, run: tuple[RunFolder, MetricLog]) -> None:
    folder, log = run
    for step in range(2500):
        log.scalar("loss", 0.5, step, 1.0 + step)
    first = MetricRelay(folder, MlflowServer(folder, server.uri))
    server.cut = [("runs/log-batch", "before")]
    with pytest.raises(CutError):
        first.look()
    with pytest.raises(UserError, match="another process relays run"):
        MetricRelay(folder, MlflowServer(folder, server.uri))
    first.close()
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder.path), server.uri])
    # The relay is killed after the server has stored a part of the second batch.
    answer, batches = Handler._answer, 0

    def kill_at_second(handler: Handler, kind: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal batches
        batches += bool(body.get("metrics"))
        if batches == 2 and body.get("metrics"):
            server.metrics += body["metrics"][:300]
            process.kill()
            return 200, {}
        return answer(handler, kind, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "_answer", kill_at_second)
        assert process.wait() == -signal.SIGKILL
    assert len(server.metrics) == 1300
    assert not look(MetricRelay(folder, MlflowServer(folder, server.uri)))
    assert server.values() == Counter(("loss", step, "0.5") for step in range(2500))


def test_relay_to_an_address_without_a_server_is_refused() -> None:
    with pytest.raises(UserError, match="--to 'mlflow=here': write mlflow=URI, such as"):
        verb(run_id=None, to="mlflow=here", experiment=None)


def test_relay_waits_for_the_end_of_a_partly_written_line(server: Server, run: tuple[RunFolder, MetricLog]) -> None:
    folder, log = run
    log.scalar("loss", 1.0, 0)
    with open(folder.metric_log(0), "ab") as file:
        file.write(b'not json\n[1]\n{"name":"loss","value":2.0,')
    relay = MetricRelay(folder, MlflowServer(folder, server.uri))
    look(relay)
    with open(folder.metric_log(0), "ab") as file:
        file.write(b'"time":1.0,"step":1}\n')
    look(relay)
    assert sorted(server.values()) == [("loss", 0, "1.0"), ("loss", 1, "2.0")]


def test_value_refused_by_the_server_stops_the_relay_with_the_error_message_of_the_server(
    server: Server, run: tuple[RunFolder, MetricLog]
) -> None:
    folder, log = run
    log.scalar("refused", 1.0, 0)
    with pytest.raises(UserError, match=f"{server.uri} refuses run {folder.run_id}: .*no such name"):
        MetricRelay(folder, MlflowServer(folder, server.uri)).look()


def test_relay_waits_longer_after_each_failure(
    server: Server, run: tuple[RunFolder, MetricLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log = run
    log.scalar("loss", 1.0, 0)
    complete(folder)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server.cut = [("experiments/get-by-name", "before")] * 7
    MetricRelay(folder, MlflowServer(folder, server.uri)).run()
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert len(server.metrics) == 1
