"""The relay passes each value of a run to a W&B server once, after any cut or kill."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.export import relay as verb
from paceline.errors import UserError
from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.trackers.relay import CutError, MetricRelay
from paceline.trackers.wandb_server import WandbServer
from tests.cli.conftest import Cli, cli
from tests.helpers import make_job, make_run

__all__ = ["cli"]

KEY = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """W&B's upsertBucket and file_stream.

    `test_fake_wandb_server_of_the_tests_accepts_the_real_wandb_client` checks them with W&B's own client.

    cut: kinds of requests whose connection breaks: "before" or "after" they count, or after "half" of the lines.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.run: dict[str, Any] = {}
        self.files: dict[str, dict[int, str]] = {}
        self.end: int | None = None
        self.cut: list[tuple[str, str]] = []
        self.requests: Counter[str] = Counter()
        self.refusal: tuple[int, object] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def lines(self) -> list[dict[str, Any]]:
        """Return the history, which has no gap."""
        lines = self.files.get("wandb-history.jsonl", {})
        assert sorted(lines) == list(range(len(lines)))
        rows = [json.loads(lines[number]) for number in sorted(lines)]
        assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
        return rows

    def values(self) -> Counter[tuple[str, int, str]]:
        own = ("step", "_step", "_timestamp", "_runtime")
        return Counter(
            (name, row["step"], str(value)) for row in self.lines() for name, value in row.items() if name not in own
        )


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.endswith(("/graphql", "/file_stream")):  # telemetry of the wandb package
            self.send_error(404)
            return
        body = json.loads(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
        kind = "file_stream" if self.path != "/graphql" else re.split(r"\W+", body["query"].strip())[1]
        self.server.requests[kind] += 1
        expected = "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()
        how = self.server.cut.pop(0)[1] if self.server.cut and self.server.cut[0][0] == kind else ""
        if self.headers["Authorization"] != expected:
            code, answer = 401, {"error": "invalid"}
        elif self.server.refusal is not None:
            code, answer = self.server.refusal  # type: ignore[assignment]
        else:
            code, answer = (200, {}) if how == "before" else self._answer(kind, body, is_half=how == "half")
        if how:
            self.close_connection = True
            return
        self.send_response(code)
        sent = json.dumps(answer).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *words: object) -> None:
        pass

    def _answer(self, kind: str, body: dict[str, Any], *, is_half: bool) -> tuple[int, dict[str, Any]]:
        server = self.server
        if kind == "file_stream":
            assert self.path == f"/files/team/{server.run['project']}/{server.run['name']}/file_stream"
            for name, chunk in body.get("files", {}).items():
                lines = chunk["content"][: len(chunk["content"]) // 2] if is_half else chunk["content"]
                server.files.setdefault(name, {}).update(enumerate(lines, chunk["offset"]))
            if body.get("complete"):
                server.end = body["exitcode"]
            return 200, {"exitcode": None, "limits": {}}
        if kind == "UpsertBucket":
            is_new = not server.run
            server.run.update({name: value for name, value in body["variables"].items() if value is not None})
            project = {"id": "p", "name": server.run["project"], "entity": {"id": "e", "name": "team"}}
            lines = len(server.files.get("wandb-history.jsonl", {}))
            bucket = {"id": "b", "name": server.run["name"], "displayName": "", "project": project}
            return 200, {
                "data": {"upsertBucket": {"bucket": {**bucket, "historyLineCount": lines}, "inserted": is_new}}
            }
        # The wandb package also uploads its settings and its log as files.
        return 200, {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as made:
        monkeypatch.setenv("WANDB_BASE_URL", made.uri)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunFolder, MetricLog]]:
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, job=make_job(arguments=("--lr", "0.1")))
    yield folder, MetricLog(folder.metric_log(0))
    with contextlib.suppress(OSError):
        os.close(fd)


def relay_of(folder: RunFolder) -> MetricRelay:
    return MetricRelay(folder, WandbServer(folder, "team/digits"))


def look(relay: MetricRelay) -> bool:
    """Look until the server has answered."""
    for _ in range(20):
        with contextlib.suppress(CutError):
            return relay.look()
    raise AssertionError("cut 20 times")


def end(folder: RunFolder, status: str = states.COMPLETED, code: int = 0) -> None:
    store.change(folder, store.stored(folder), status, ended_utc="2026-11-28T12:00:00.000Z", exit_code=code)


def test_relay_of_a_running_run_sends_its_values_and_later_its_end(
    server: Server, run: tuple[RunFolder, MetricLog]
) -> None:
    folder, log = run
    tags_and_properties.set_tags(folder.notes, {"team": "vision", "draft": None})
    relay = relay_of(folder)
    log.scalar("loss", 1.0, 0, 12.5)
    log.scalar("acc", 0.5, 0, 12.5)
    log.scalar("text", "warm", 0)
    log.scalar("val/loss", float("nan"), 3, 13.0)
    assert not look(relay)
    MetricLog(folder.metric_log(1)).scalar("loss", 2.0, 0, 12.6)
    log.scalar("free", 5)
    assert not look(relay)
    expected = [("loss", 0, "1.0"), ("acc", 0, "0.5"), ("val/loss", 3, "nan"), ("free", 0, "5.0"), ("loss", 0, "2.0")]
    assert server.values() == Counter(expected)
    # Values of one step are columns of one line, as after wandb.log with a dict.
    assert [sorted(row)[3:] for row in server.lines()[:2]] == [["acc", "loss", "step"], ["step", "val/loss"]]
    assert server.lines()[0]["_timestamp"] == 12.5
    config = json.loads(server.run["config"])
    assert config["lr"] == {"value": 0.1}
    assert config["_wandb"]["value"]["m"][:2] == [{"1": "step"}, {"1": "loss", "5": 1, "6": [1, 3]}]
    assert (server.run["name"], server.run["groupName"]) == (folder.run_id, "digits")
    assert sorted(server.run["tags"]) == ["draft", "team=vision"]
    summary = json.loads(server.files["wandb-summary.json"][0])
    assert (summary["loss"], summary["free"]) == (1.0, 5.0)
    # The server gets a heartbeat although nothing is new.
    before = server.requests["file_stream"]
    assert not look(relay)
    assert server.requests["file_stream"] == before + 1
    assert server.end is None
    end(folder)
    assert look(relay)
    assert server.end == 0
    # A relay that is started again has nothing to send.
    relay.close()
    requests = server.requests.copy()
    assert relay_of(folder).look()
    assert server.requests == requests


@pytest.mark.parametrize(("status", "code", "sent"), [(states.FAILED, 3, 3), (states.CANCELED, 0, 1)])
def test_run_that_did_not_complete_is_marked_as_failed_in_wandb(
    server: Server, run: tuple[RunFolder, MetricLog], status: str, code: int, sent: int
) -> None:
    end(run[0], status, code)
    assert look(relay_of(run[0]))
    assert server.end == sent


@pytest.mark.parametrize("how", ["before", "after", "half"])
@pytest.mark.parametrize("kind", ["UpsertBucket", "file_stream"])
def test_relay_sends_each_value_once_although_the_connection_breaks(
    server: Server, run: tuple[RunFolder, MetricLog], kind: str, how: str
) -> None:
    folder, log = run
    other = MetricLog(folder.metric_log(1))
    relay = relay_of(folder)
    for step in range(10):
        log.scalar("loss", step / 2, step)
    server.cut = [(kind, how)] * 3
    # Rank 1 logs a value after each failed request. The repeated request still begins with the same line number.
    for step in range(40):
        with contextlib.suppress(CutError):
            relay.look()
        other.scalar("other", float(step), step)
    end(folder)
    look(relay)
    assert server.cut == []
    expected = [("loss", step, str(step / 2)) for step in range(10)]
    assert server.values() == Counter(expected + [("other", step, str(float(step))) for step in range(40)])
    assert server.end == 0


KILLED = """
import sys
from pathlib import Path
from paceline.runs.folder import RunFolder
from paceline.trackers.relay import MetricRelay
from paceline.trackers.wandb_server import WandbServer
folder = RunFolder(Path(sys.argv[1]))
MetricRelay(folder, WandbServer(folder, "team/digits")).look()
"""


def test_killed_relay_resumes_and_sends_each_value_once(
    server: Server, run: tuple[RunFolder, MetricLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run[0]
    late = MetricLog(folder.metric_log(1))
    for step in range(2500):
        late.scalar("loss", 0.5, step, 1.0 + step)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder.path)])
    answer, batches = Handler._answer, 0

    def kill_at_second(
        handler: Handler, kind: str, body: dict[str, Any], *, is_half: bool
    ) -> tuple[int, dict[str, Any]]:
        nonlocal batches
        batches += "wandb-history.jsonl" in body.get("files", {})
        if batches == 2:
            process.kill()
        return answer(handler, kind, body, is_half=batches == 2)

    with monkeypatch.context() as patch:
        patch.setattr(Handler, "_answer", kill_at_second)
        assert process.wait() == -signal.SIGKILL
    assert len(server.lines()) == 1500
    # Now rank 0, whose log is read first, has a value too. The lines of the unanswered request must stay the same.
    run[1].scalar("first", 1.0, 0, 1.0)
    assert not look(relay_of(folder))
    assert server.values() == Counter([("first", 0, "1.0"), *(("loss", step, "0.5") for step in range(2500))])
    assert server.lines()[-1]["first"] == 1.0


def test_wandb_run_with_values_of_another_relay_is_refused(server: Server, run: tuple[RunFolder, MetricLog]) -> None:
    server.files["wandb-history.jsonl"] = {0: '{"_step": 0}'}
    with pytest.raises(UserError, match=r"has values at http.*/team/digits/runs/.* that this relay did not send"):
        relay_of(run[0]).look()


def test_relay_to_a_deleted_wandb_run_is_refused(server: Server, run: tuple[RunFolder, MetricLog]) -> None:
    relay = relay_of(run[0])
    look(relay)
    relay.close()
    server.run.clear()
    with pytest.raises(UserError, match=r"was deleted at .* Relay it to another project"):
        relay_of(run[0]).look()


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((404, {"errors": [{"message": "project not found"}]}), "refuses run .*: 404 .*project not found"),
        ((200, {"data": None, "errors": [{"message": "permission denied\x1b[2J"}]}), r"permission denied\\x1b"),
        ((200, []), "refuses run"),
    ],
)
def test_refusal_by_the_wandb_server_stops_the_relay_with_the_error_message_of_the_server(
    server: Server, run: tuple[RunFolder, MetricLog], refusal: tuple[int, object], message: str
) -> None:
    server.refusal = refusal
    with pytest.raises(UserError, match=message):
        relay_of(run[0]).look()


@pytest.mark.parametrize("code", [409, 429, 500, 503])
def test_temporary_error_of_the_wandb_server_is_retried(
    server: Server, run: tuple[RunFolder, MetricLog], code: int
) -> None:
    relay = relay_of(run[0])
    server.refusal = (code, {})
    with pytest.raises(CutError, match=str(code)):
        relay.look()
    server.refusal = None
    assert not relay.look()


def test_api_key_is_in_no_file_and_no_message(
    server: Server,
    run: tuple[RunFolder, MetricLog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, log = run
    log.scalar("loss", 1.0, 0)
    end(folder)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.cut = [("UpsertBucket", "before"), ("UpsertBucket", "after")]
    relay_of(folder).run()
    assert "does not answer" in caplog.text
    wrong = "f" * 40
    monkeypatch.setenv("WANDB_API_KEY", wrong)
    with pytest.raises(UserError, match=r"refuses the key. Set WANDB_API_KEY") as caught:
        MetricRelay(folder, WandbServer(folder, "other")).look()
    output = capfd.readouterr()
    texts = [caplog.text, str(caught.value), output.out, output.err]
    texts += [path.read_text(errors="replace") for path in folder.path.rglob("*") if path.is_file()]
    for key in (KEY, wrong):
        token = base64.b64encode(f"api:{key}".encode()).decode()
        assert not any(key in text or token in text for text in texts)


def test_redirect_does_not_get_the_api_key(
    server: Server, run: tuple[RunFolder, MetricLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/login")  # type: ignore[attr-defined]
            self.end_headers()

        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{other.server_port}")
        with pytest.raises(UserError, match=r"redirects to .*/login. Set WANDB_BASE_URL"):
            relay_of(run[0]).look()
        other.shutdown()
    assert asked == [None]


@pytest.mark.parametrize("target", ["", "/digits", "a/b/c", "team/", "a:b", "x" * 129, "a\nb"])
def test_invalid_project_is_refused(server: Server, run: tuple[RunFolder, MetricLog], target: str) -> None:
    with pytest.raises(UserError, match="write wandb=PROJECT or wandb=ENTITY/PROJECT"):
        WandbServer(run[0], target)
    assert not server.requests


def test_experiment_option_is_refused_for_a_relay_to_wandb() -> None:
    with pytest.raises(UserError, match="--experiment belongs to mlflow"):
        verb(run_id=None, to="wandb=digits", experiment="x")


@pytest.mark.parametrize("address", ["wandb.lab", "https://ann:secret@wandb.lab", "http://"])
def test_invalid_wandb_base_url_is_refused_without_showing_it_in_the_error(
    run: tuple[RunFolder, MetricLog], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", address)
    with pytest.raises(UserError, match="WANDB_BASE_URL is no address") as caught:
        WandbServer(run[0], "digits")
    assert "secret" not in str(caught.value)


def test_wandb_api_key_is_read_from_netrc_and_a_missing_key_is_refused(
    server: Server, run: tuple[RunFolder, MetricLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match=r"The API key of http.* is missing. Set WANDB_API_KEY, or call `wandb login`"):
        relay_of(run[0])
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1:{server.server_port}\n  login user\n  password {KEY}\n")
    assert not look(relay_of(run[0]))
    assert server.run["project"] == "digits"
    monkeypatch.setenv("WANDB_API_KEY", "two\nlines of text")
    with pytest.raises(UserError, match="has characters that no key has") as caught:
        WandbServer(run[0], "digits")
    assert "lines" not in str(caught.value)


OWN_CLIENT = """
import wandb
run = wandb.init(entity="team", project="digits", id="own", config={"lr": 0.1},
                 settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True))
run.define_metric("loss", step_metric="step")
for step in range(5):
    run.log({"loss": step / 2, "step": step})
run.log({"nan": float("nan"), "step": 5})
run.finish(exit_code=3)
"""


@pytest.mark.slow
def test_fake_wandb_server_of_the_tests_accepts_the_real_wandb_client(server: Server, tmp_path: Path) -> None:
    """The server of these tests gets from W&B's own client the same messages as from the relay."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"WANDB_BASE_URL": server.uri, "WANDB_API_KEY": KEY, "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", OWN_CLIENT], env=env, cwd=tmp_path, check=True, timeout=120)
    assert [(row["_step"], row["step"], row.get("loss")) for row in server.lines()] == [
        *((step, step, step / 2) for step in range(5)),
        (5, 5, None),
    ]
    assert str(server.lines()[5]["nan"]) == "nan"
    config = json.loads(server.run["config"])
    assert config["lr"] == {"value": 0.1}
    metrics = config["_wandb"]["value"]["m"]
    (loss,) = (metric for metric in metrics if metric["1"] == "loss")
    assert metrics[loss["5"] - 1]["1"] == "step"
    assert loss["6"] == [1, 3]
    assert json.loads(server.files["wandb-summary.json"][0])["loss"] == 2.0
    assert server.end == 3


def test_command_that_sends_a_run_to_wandb_prints_its_address_there(server: Server, cli: Cli) -> None:
    cli.script("import paceline\npaceline.Run.get_context().log('loss', 0.5, step=7)\n")
    cli("run", "--name", "brave", "src/train.py")
    env = {"WANDB_BASE_URL": server.uri, "WANDB_API_KEY": KEY}
    printed = cli("relay", "brave", "--to", "wandb=digits", env=env).stdout
    (run_id,) = cli.run_ids()
    assert printed == f"All metrics of {run_id} are at {server.uri}/team/digits/runs/{run_id}.\n"
    assert server.values() == Counter([("loss", 7, "0.5")])
    assert server.end == 0
