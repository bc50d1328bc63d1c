"""Messages at a run's end; a failed one changes nothing but the warnings."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import notify, states, store, tags_and_properties
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.messenger import Messenger, MetricAlerts
from paceline.runs.metrics import MetricLog
from paceline.runs.read import record as read_record
from paceline.system.files import append_line, write_json
from tests.cli.conftest import Cli, cli
from tests.helpers import make_job, make_run

__all__ = ["cli"]


def name_of(folder: RunFolder) -> str | None:
    return tags_and_properties.read(folder.notes).name


class Hooks(HTTPServer):
    """Keeps posted requests; answers 500 to /broken, and otherwise as a Matrix server answers a login and a join."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Hooks)
        data = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.server.got.append((self.path, json.loads(data) if data[:1] == "{" else data))
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()
        self.wfile.write(b'{"access_token": "t", "home_server": "h", "user_id": "@u:h", "room_id": "!lab:h"}')

    do_PUT = do_POST  # noqa: N815 - the name is http.server's

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    server = Hooks()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.promise("whoever-wants-know-told-run")
def test_each_notification_service_receives_its_message_in_its_own_format(
    tmp_path: Path, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in {
        "sendmail": f"cat > {tmp_path}/mail; echo $@ >> {tmp_path}/mail",
        "bad": "echo no use >&2; exit 3",
    }.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    hook = {kind: f"{kind}:env:{kind.upper()}" for kind in ("slack", "teams", "webhook", "ntfy")}
    told = tmp_path / "told"
    wanted = [
        *hook.values(),
        "mail:ann@example.com",
        f"""command:sh -c 'cat > {told}; echo "$PACELINE_RUN_STATUS" >> {told}'""",
        "command:bad",
        "command:/no/such/program",
        "webhook:env:BROKEN",
        "webhook:env:NOBODY",
        "webhook:env:GONE",
    ]
    report = FailureReport(
        cause="exception", message="ValueError: <b> & co", last_lines=tuple(f"line {n}" for n in range(20))
    )
    folder, fd = make_run(tmp_path / "runs", job=make_job(notify=wanted))
    os.close(fd)
    addresses = {f"notify {one}": f"{hooks.url}/{kind}" for kind, one in hook.items()}
    addresses |= {
        "notify webhook:env:BROKEN": f"{hooks.url}/broken",
        "notify webhook:env:NOBODY": "http://127.0.0.1:1/secret",
    }
    write_json(folder.secrets, addresses)
    wrong = store.change(folder, store.stored(folder), states.FAILED, failure=report, exit_code=1).warnings

    got = dict(hooks.got)
    assert got["/slack"]["text"].startswith(f"*{name_of(folder)}: Failed*\n```ValueError: &lt;b&gt; &amp; co\n")
    assert "line 11" in got["/slack"]["text"]
    assert "line 12" not in got["/slack"]["text"]  # only the first 15 lines are sent
    card = got["/teams"]["attachments"][0]["content"]
    assert [block["type"] for block in card["body"]] == ["TextBlock", "TextBlock", "FactSet"]
    assert got["/ntfy"].startswith(f"{name_of(folder)}: Failed\n\nValueError: <b> & co\n")
    assert got["/webhook"]["failure"] == {"cause": "exception", "message": "ValueError: <b> & co"}
    mail = (tmp_path / "mail").read_text()
    assert f"Subject: {name_of(folder)}: Failed" in mail
    assert mail.endswith("-t -oi\n")
    data, _, status = told.read_text().rpartition("}")
    assert status == "Failed\n"
    assert json.loads(f"{data}}}")["run_id"] == folder.run_id
    assert [text.rpartition("end: ")[2] for text in wrong] == [
        "it ended with 3: no use.",
        "'/no/such/program' can't be run: No such file or directory.",
        "it answered 500.",
        "[Errno 111] Connection refused.",
        "its URL is not in the run's folder any more.",
    ]
    assert not any("/secret" in text or hooks.url in text for text in wrong)


@pytest.mark.promise("whoever-wants-know-told-run")
@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise imports this module
def test_apprise_urls_receive_notifications_and_delivery_warnings_show_no_url(
    tmp_path: Path, hooks: Hooks, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("apprise")
    host = hooks.url.removeprefix("http://")
    urls = {
        "apprise:env:NTFY": f"ntfy://{host}/topic",
        "apprise:env:MATRIX": f"matrix://ann:hidden@{host}/!lab:h",
        "apprise:env:BROKEN": f"json://ann:hidden@{host}/broken",
        "apprise:env:NOBODY": "json://ann:hidden@127.0.0.1:1",
        "apprise:env:BAD": "nosuch://hidden",
    }
    folder, fd = make_run(tmp_path / "runs", job=make_job(notify=list(urls)))
    os.close(fd)
    report = FailureReport(cause="exception", message="ValueError: <b> & co")
    write_json(folder.secrets, {f"notify {one}": url for one, url in urls.items()})
    wrong = store.change(folder, store.stored(folder), states.FAILED, failure=report, exit_code=1).warnings

    [ntfy] = [got for _, got in hooks.got if isinstance(got, dict) and got.get("topic") == "topic"]
    assert ntfy["title"] == f"{name_of(folder)}: Failed"
    assert ntfy["message"].startswith("ValueError: <b> & co\n\nrun: ")
    [matrix] = [got for path, got in hooks.got if "/send/m.room.message" in path]
    assert "ValueError: <b> & co" in matrix["body"]
    assert [text.rpartition("end: ")[2] for text in wrong] == [
        "it answered 500.",
        "apprise could not deliver the message.",
        "apprise knows no service with this URL.",
    ]
    assert "hidden" not in "".join([*wrong, *capfd.readouterr()])


@pytest.mark.promise("whoever-wants-know-told-run")
def test_failed_run_is_notified_and_its_record_has_no_url(cli: Cli, hooks: Hooks) -> None:
    cli.script("raise ValueError('bad batch')\n")
    words = ["--notify", "webhook:env:HOOK", "--notify", "webhook:env:BROKEN"]
    assert "HOOK" in cli("run", *words, "src/train.py", code=2).stderr  # the error comes before anything starts
    for name in ("HOOK", "BROKEN"):
        wrong = {"HOOK": hooks.url, "BROKEN": hooks.url, name: "hooks.slack.com/x"}
        error = cli("run", *words, "src/train.py", env=wrong, code=2).stderr
        assert f"'webhook:env:{name}': the value at this place is not a URL that begins with https://" in error
        assert "slack" not in error
    assert cli.run_ids() == []
    environment = {"HOOK": f"{hooks.url}/hook", "BROKEN": f"{hooks.url}/broken"}
    done = cli("run", *words, "src/train.py", env=environment, code=1)
    ((_, told),) = [one for one in hooks.got if one[0] == "/hook"]
    assert (told["status"], told["exit_code"], told["failure"]["cause"]) == ("Failed", 1, "exception")
    assert "ValueError: bad batch" in told["text"]
    sentence = "no message to webhook:env:BROKEN about the run's end: it answered 500."
    assert sentence in done.stderr + done.stdout
    found = cli.json("show")
    assert found["status"] == "Failed"
    assert found["warnings"] == [sentence]
    folder = Path(found["folder"])
    kept = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in kept if hooks.url.encode() in path.read_bytes()]
    assert not (folder / "secrets.json").exists()


def _all_kept(cli: Cli) -> list[bytes]:
    paths = (cli.folder / ".paceline").rglob("*")
    return [path.read_bytes() for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.promise("sweep-pipeline-told-once")
def test_pipeline_sends_one_start_and_one_end_notification_if_several_steps_name_the_receiver(
    cli: Cli, hooks: Hooks
) -> None:
    cli.script("")
    step = {"entry_script": "train.py", "notify": ["webhook:env:HOOK"]}
    steps = {"a": step, "b": {**step, "after": ["a"], "notify_on": ["start"]}}
    (cli.folder / "src/p.yaml").write_text(json.dumps({"steps": steps}))
    cli("pipeline", "run", "src/p.yaml", env={"HOOK": f"{hooks.url}/hook"})
    [(_, start), (_, end)] = hooks.got
    assert (start["event"], end["event"], end["status"]) == ("start", "end", "Completed")
    assert start["run_id"] == end["run_id"] == min(cli.run_ids())
    assert "2 steps: 2 Completed" in end["text"]
    assert not [data for data in _all_kept(cli) if hooks.url.encode() in data]


@pytest.mark.promise("sweep-pipeline-told-once")
def test_sweep_sends_one_digest_and_a_message_on_a_new_best_trial(cli: Cli, hooks: Hooks) -> None:
    cli.script(
        """
        import sys
        import paceline
        x = float(sys.argv[sys.argv.index("--x") + 1])
        assert x < 3
        paceline.Run.get_context().log("loss", x)
        """
    )
    words = ["--param", "x=choice(1, 2, 3)", "--sampler", "grid", "--metric", "loss=minimize"]
    told = ["--notify", "webhook:env:HOOK", "--notify-on", "end", "--notify-on", "best"]
    cli("sweep", "run", *words, *told, "src/train.py", env={"HOOK": f"{hooks.url}/hook"})
    *best, (_, end) = hooks.got
    sweep_id = min(cli.run_ids())
    assert {got["run_id"] for _, got in hooks.got} == {sweep_id}
    assert {got["event"] for _, got in best} == {"best"}
    assert end["event"] == "end"
    assert f"best: {sweep_id}_0, loss 1; x=1" in end["text"]
    assert "3 trials: 2 Completed, 1 Failed" in end["text"]
    assert not [data for data in _all_kept(cli) if hooks.url.encode() in data]


@pytest.mark.promise("hang-told-shown-page-button")
def test_hang_notification_has_the_start_time_and_reason(tmp_path: Path, hooks: Hooks) -> None:
    hang = {"since_utc": "2026-11-23T06:12:03.000Z", "text": "Rank 0 waits for rank 1.", "report": "hang.txt"}
    job = make_job(notify=["webhook:env:W"])
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, job=job, hang=hang)
    os.close(fd)
    write_json(folder.secrets, {"notify webhook:env:W": f"{hooks.url}/hook"})
    assert notify.tell(folder, store.stored(folder), "hang") == []
    [(_, got)] = hooks.got
    assert (got["status"], got["event"]) == ("Running", "hang")
    assert got["text"].startswith(
        f"{name_of(folder)}: Running, hangs since 2026-11-23 06:12:03 UTC\n\nRank 0 waits for rank 1.\n"
    )


@pytest.mark.parametrize(
    ("events", "status", "heard"),
    [
        ([], states.COMPLETED, ["end"]),
        (["failure"], states.COMPLETED, []),
        (["failure"], states.FAILED, ["end"]),
        (["end", "failure"], states.FAILED, ["end"]),
        (["start"], states.FAILED, []),
    ],
)
def test_state_change_is_notified_once_and_only_if_its_event_is_chosen(
    tmp_path: Path, hooks: Hooks, events: list[str], status: str, heard: list[str]
) -> None:
    chosen = {"notify_on": events} if events else {}
    folder, fd = make_run(tmp_path / "runs", job=make_job(notify=["webhook:env:W"], **chosen))
    os.close(fd)
    write_json(folder.secrets, {"notify webhook:env:W": f"{hooks.url}/hook"})
    store.change(folder, store.stored(folder), status)
    assert [got["event"] for _, got in hooks.got] == heard


def test_start_is_notified_once_and_before_the_end(cli: Cli, hooks: Hooks) -> None:
    cli.script(
        """
        import os, sys
        sys.exit(os.environ["PACELINE_ATTEMPT"] == "1")
        """
    )
    words = ["--notify", "webhook:env:HOOK", *(f"--notify-on={one}" for one in ("allocated", "start", "end"))]
    restarts = ["--max-restarts", "1", "--restart-on-exception"]
    cli("run", *words, *restarts, "src/train.py", env={"HOOK": f"{hooks.url}/hook"})
    events = [("allocated", "Preparing"), ("start", "Running"), ("end", "Completed")]
    assert [(got["event"], got["status"]) for _, got in hooks.got] == events
    assert "left the queue" in hooks.got[0][1]["text"]
    assert "Running on local" in hooks.got[1][1]["text"]


@pytest.mark.promise("whoever-wants-know-told-run")
@pytest.mark.parametrize("all_killed", [False, True], ids=["supervisor", "supervisor and guardian"])
def test_end_after_the_supervisor_was_killed_is_notified_once(cli: Cli, hooks: Hooks, all_killed: bool) -> None:
    cli.script("import time\ntime.sleep(600)\n")
    words = ["submit", "--notify", "webhook:env:HOOK", "src/train.py"]
    run_id = cli(*words, env={"HOOK": f"{hooks.url}/hook"}).stdout.strip()
    cli.wait(run_id, "Running")
    folder = RunFolder(cli.run_folder(run_id))
    supervisor = store.stored(folder).owner["pid"]
    guardian = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in [guardian, supervisor] if all_killed else [supervisor]:
        os.kill(pid, signal.SIGKILL)
    # Two commands detect the end of the run at the same time.
    looks = [cli.start("show", run_id) for _ in range(2)]
    assert [look.communicate(timeout=60)[1] for look in looks] == ["", ""]
    cli.wait(run_id, "Failed")
    assert [(got["event"], got["status"]) for _, got in hooks.got] == [("end", "Failed")]
    assert "was killed while the run was Running" in hooks.got[0][1]["text"]
    assert not folder.secrets.exists()


@pytest.mark.promise("whoever-wants-know-told-run")
def test_end_notification_sent_before_the_supervisor_was_killed_is_not_repeated(tmp_path: Path, hooks: Hooks) -> None:
    receivers = [f"webhook:env:{name}" for name in "ABC"]
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, job=make_job(notify=receivers))
    write_json(folder.secrets, {f"notify {one}": f"{hooks.url}/{one[-1]}" for one in receivers})
    append_line(folder.told, {"to": receivers[0], "status": "Failed"})
    append_line(
        folder.told, {"to": receivers[1], "status": "Completed"}
    )  # as if the supervisor had been killed before it wrote this
    os.close(fd)
    assert read_record(folder).status == "Failed"
    assert sorted(path for path, _ in hooks.got) == ["/B", "/C"]


def test_notification_command_in_a_run_record_written_by_another_user_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(notify=[f"command:touch {tmp_path}/started"])
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, job=job)
    os.close(fd)
    monkeypatch.setattr(notify, "has_own_record", lambda folder: False)
    found = read_record(folder)
    assert found.status == "Failed"
    assert found.warnings[0].endswith("another user wrote the run's record.")
    assert not (tmp_path / "started").exists()


ALERT = "metrics.loss > 10 or metrics.loss = nan"


def test_fulfilled_metric_condition_is_notified_once(cli: Cli, hooks: Hooks) -> None:
    cli.script(
        """
        import os, sys
        import paceline
        first = os.environ["PACELINE_ATTEMPT"] == "1"
        for step in range(20):
            paceline.Run.get_context().log("loss", 12.5 if first else float("nan"), step=step)
        sys.exit(first)
        """
    )
    words = ["--notify", "webhook:env:HOOK", "--notify-on", ALERT, "--notify-on", "metrics.acc < 0.1"]
    cli("run", *words, "--max-restarts=1", "--restart-on-exception", "src/train.py", env={"HOOK": f"{hooks.url}/hook"})
    ((_, got),) = hooks.got
    assert got["event"] == ALERT
    title, _, text = got["text"].partition("\n\n")
    assert title.endswith(f": {ALERT}")
    assert text.startswith("metrics.loss is ")


def test_metric_condition_is_tested_while_the_run_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    receivers = [f"command:sh -c 'echo {name} >> {told}'" for name in ("a", "b")]
    condition = 'metrics."<b>&loss".max >= 3'
    folder, fd = make_run(
        tmp_path / "runs", status=states.RUNNING, job=make_job(notify=receivers, notify_on=[condition, "end"])
    )
    record, log = read_record(folder), MetricLog(folder.metric_log(0))
    seconds = [0.0]
    monkeypatch.setattr("paceline.runs.messenger.time.monotonic", lambda: seconds[0])

    def alerts() -> tuple[Messenger, MetricAlerts]:
        messenger = Messenger(folder)
        return messenger, MetricAlerts(folder, messenger, record.job.notify_on if record.job else ())

    messenger, watched = alerts()
    for value in (1.0, 3.0, 1.0):
        seconds[0] += 1
        watched.look(record)
        log.scalar("<b>&loss", value)
    assert messenger.wrong() == []
    assert not told.exists()
    seconds[0] += 5
    watched.look(record)
    watched.look(record, is_last=True)
    assert messenger.wrong() == []
    assert sorted(told.read_text()) == sorted("a\nb\n")
    # A supervisor of the same run that starts later sends the message only to receivers that did not get it.
    folder.told.write_text("".join(folder.told.read_text().splitlines(keepends=True)[:1]))
    messenger, watched = alerts()
    watched.look(record)
    assert messenger.wrong() == []
    assert len(told.read_text().split()) == 3
    os.close(fd)


@pytest.mark.parametrize(
    ("condition", "rule"),
    [
        ("loss > 10", "there is no field 'loss'"),
        ("metrics.loss > ten", "a number such as 0.9"),
        ("metrics.loss >", "lacks a value"),
        ("state = failed", "has state. Compare metrics, such as metrics.loss > 10, or duration."),
        ("vision metrics.loss > 1", "has a word. Compare metrics"),
    ],
)
def test_invalid_metric_condition_is_refused_before_the_run(cli: Cli, condition: str, rule: str) -> None:
    cli.script("print('no')\n")
    words = ["--notify", "mail:ann@example.com", "--notify-on", condition, "src/train.py"]
    assert rule in cli("run", *words, code=2).stderr
    assert rule in cli("run", "--dry-run", *words, code=2).stderr
    assert cli.json("list") == []


def test_metric_condition_for_a_sweep_is_refused(cli: Cli) -> None:
    cli.script(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
    )
    words = [
        "--param",
        "lr=choice(1, 2)",
        "--metric",
        "loss",
        "--notify",
        "mail:ann@example.com",
        "--notify-on",
        "metrics.loss > 1",
    ]
    assert "a sweep has no metrics of its own" in cli("sweep", "run", "src/train.py", *words, code=2).stderr
