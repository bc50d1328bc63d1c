"""The parts of a session, and sessions on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.cli.sessions import ssh_config
from paceline.runs.folder import RunFolder
from paceline.sessions import Serving, serving, serving_line
from paceline.sessions.jupyter import Jupyter
from paceline.sessions.notebooks import Notebooks
from paceline.sessions.ssh import configuration
from paceline.system import processes
from paceline.system.files import write_json
from tests.cli.conftest import Cli, cli
from tests.engines.lab import processes_below
from tests.helpers import free_port, wait_until, write_tree

__all__ = ["cli"]

#: This program stands in for JupyterLab: it answers requests that have the token, at the given port.
JUPYTERLAB = """
import http.server, json, os, sys

port = int(next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2])
assert "--ip=127.0.0.1" in sys.argv

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        token = os.environ["JUPYTER_TOKEN"]
        known = self.headers.get("Authorization") == f"token {token}" or f"token={token}" in self.path
        self.send_response(200 if known else 403)
        self.end_headers()
        path = self.path.partition("?")[0]
        answers = {"/api/status": {}, "/api/kernels": [], "/api/terminals": []}
        if os.path.exists("answers.json"):
            with open("answers.json") as file:
                answers |= json.load(file)
        if known:
            self.wfile.write(json.dumps(answers.get(path, path)).encode())
    def log_message(self, *args): pass

open("new.ipynb", "w").write("{}")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_address_of_a_session_is_read_from_its_log():
    found = Serving(kind="ssh", at="ann /usr/sbin/sshd -i -f '/tmp/a b/sshd_config'")
    log = f"noise\n{serving_line(Serving(kind='jupyter', at='1'))}\nmore\n{serving_line(found)}\n[I] ready"
    assert serving(log) == found
    assert serving("paceline: this session serves tea at 4") is None


def test_changed_notebooks_are_copied_to_outputs_and_checkpoints_and_restored_in_a_new_session(tmp_path):
    work = write_tree(tmp_path / "work", {"old.ipynb": "1", "a/b.ipynb": "2", "x.py": "", ".git/c.ipynb": ""})
    places = (tmp_path / "checkpoints", tmp_path / "outputs")
    notebooks = Notebooks(work, *places)
    assert notebooks.keep() is False
    (work / "a" / "b.ipynb").write_text("changed")
    (work / "new.ipynb").write_text("3")
    assert notebooks.keep() is True
    assert notebooks.keep() is False
    for place in places:
        kept = {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob("*.ipynb")}
        assert kept == {"notebooks/a/b.ipynb": "changed", "notebooks/new.ipynb": "3"}
    again = write_tree(tmp_path / "again", {"a/b.ipynb": "2"})
    Notebooks(again, *places).restore()
    assert (again / "a" / "b.ipynb").read_text() == "changed"
    assert (again / "new.ipynb").read_text() == "3"


def test_sshd_config_accepts_only_the_key_of_the_session():
    text = configuration(
        Path("/d"), {"A": 'x" evil', "B": "two words", "BASH_FUNC_x%%": "y", "C": "a\nPermitRootLogin yes"}
    )
    assert 'SetEnv "B=two words"' in text
    for rule in ("PasswordAuthentication no", "AuthorizedKeysFile /d/authorized_keys", "HostKey /d/host_key"):
        assert rule in text.splitlines()
    assert "evil" not in text
    assert "PermitRootLogin yes" not in text


def test_ssh_config_of_a_session_connects_through_paceline_exec():
    folder = RunFolder(Path("/w%s/my runs/runs/dev_1_00000000"))
    text = ssh_config(folder, Serving(kind="ssh", at="ann /usr/sbin/sshd -i -f '/tmp/a b/sshd_config'"))
    assert text.startswith("Host dev_1_00000000\n")
    assert "User ann" in text
    proxy = next(line for line in text.splitlines() if "ProxyCommand" in line)
    assert "exec --no-terminal dev_1_00000000 -- /usr/sbin/sshd -i -f '/tmp/a b/sshd_config'" in proxy
    # ssh expands %s, so the config has %%s.
    assert "w%%s" in proxy


def open_session(cli: Cli, *words: object) -> tuple[subprocess.Popen[str], str, str]:
    """Start `paceline dev`. Return the process, the session's run, and the address that it printed."""
    process = cli.start("dev", *words)
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.stderr.read())
    told = ""
    while (found := re.search(r"paceline dev --run (\S+)\.", told)) is None:
        told += process.stderr.readline()
    return process, found[1], line.strip()


def fetched(url: str) -> object:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:  # otherwise its socket stays open until a garbage collection in another test
            raise


@pytest.mark.promise("session-is-a-run")
def test_notebook_session_serves_its_url_and_keeps_notebooks_for_a_resumed_session(cli: Cli) -> None:
    write_tree(cli.folder, {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": JUPYTERLAB})
    process, run_id, url = open_session(cli, "--idle", "0")
    assert fetched(url) == "/lab"
    # A process of another user can't use the address without the token.
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(url.partition("?")[0])
    assert "token" not in (cli.run_folder(run_id) / "job.json").read_text().lower().replace("jupyter_token", "")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    # Ctrl-C ended only the command. The session goes on, and a second command opens a tunnel to it.
    other, same, tunnelled = open_session(cli, "--run", run_id, "--local", free_port())
    assert same == run_id
    assert tunnelled != url
    assert fetched(tunnelled) == "/lab"
    cli("cancel", "--wait", run_id)
    assert other.wait(120) == 0
    for one in (process, other):
        assert one.stdout is not None
        assert one.stderr is not None
        one.stdout.close()
        one.stderr.close()
    assert (cli.run_folder(run_id) / "outputs" / "notebooks" / "new.ipynb").read_text() == "{}"
    again = cli("dev", "--shell", "--resume", run_id, "-d").stdout.strip()
    work = cli.run_folder(again) / "work"
    try:
        # The state becomes Running before the worker has restored the files.
        wait_until(lambda: list(work.rglob("new.ipynb")), "the notebook is restored", 60)
        cli("exec", again, "--", "ls")
    finally:
        cli("cancel", "--wait", again)


@pytest.mark.promise("session-is-a-run")
def test_idle_session_ends(cli: Cli) -> None:
    run_id = cli("dev", "--shell", "--idle", "1s", "-d").stdout.strip()
    assert cli.wait(run_id) == "Completed"
    assert "ends after 1 s without activity" in cli("logs", run_id).stdout


IDLE = {"execution_state": "idle", "last_activity": "2026-01-01T00:00:00.000000Z"}


def test_jupyterlab_was_used_while_a_kernel_is_busy_and_after_activity_of_kernels_and_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path, {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": JUPYTERLAB, "watch/x": ""})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUPYTER_TOKEN", "t")
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path / "watch"))
    lab = Jupyter()
    try:

        def was_used(kernels: object = (), terminals: object = ()) -> bool:
            write_json(tmp_path / "answers.json", {"/api/kernels": kernels, "/api/terminals": terminals})
            return lab.was_used()

        assert not was_used()
        assert was_used([IDLE])  # a user has started this kernel
        assert not was_used([IDLE])
        busy = {**IDLE, "execution_state": "busy"}
        assert was_used([IDLE, busy])
        assert was_used([IDLE, busy])
        assert not was_used([IDLE])
        assert was_used([{**IDLE, "last_activity": "2026-01-01T00:00:05.000000Z"}])
        assert not was_used()  # the user has shut the kernel down
        terminal = {"name": "1", "last_activity": "2026-01-01T00:00:07.000000Z"}
        assert was_used([IDLE], [terminal])
        assert not was_used([IDLE], [terminal])
    finally:
        lab.close()


def test_busy_kernel_keeps_a_session_from_ending_as_idle_and_a_quiet_kernel_does_not(cli: Cli) -> None:
    busy = json.dumps({"/api/kernels": [{**IDLE, "execution_state": "busy"}]})
    package = {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": JUPYTERLAB}
    write_tree(cli.folder, {**package, "answers.json": busy})
    run_id = cli("dev", "--idle", "2s", "-d").stdout.strip()
    log = RunFolder(cli.run_folder(run_id)).live_log(0)
    wait_until(lambda: log.exists() and "serves jupyter" in log.read_text(), "the session serves", timeout_s=120)
    time.sleep(6)
    assert cli.wait(run_id, "Running") == "Running"
    (answers,) = (cli.run_folder(run_id) / "work").rglob("answers.json")
    write_json(answers, {"/api/kernels": [IDLE]})
    assert cli.wait(run_id) == "Completed"
    assert "ends after 2 s without activity" in cli("logs", run_id).stdout


def test_open_shell_keeps_a_session_from_ending_as_idle(cli: Cli) -> None:
    process = cli.start("dev", "--shell", "--idle", "4s", env={"SHELL": "/bin/sh"}, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("echo in $PACELINE_RUN_ID\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("in ")
    time.sleep(8)
    out, err = process.communicate("echo still here; exit 3\n", timeout=180)
    assert (process.returncode, out) == (3, "still here\n"), err


def test_session_is_attached_while_a_command_runs_beside_it_but_not_by_a_tunnel(cli: Cli) -> None:
    run_id = cli.submit(
        """
        import time
        from paceline.sessions.__main__ import attached
        was = None
        while True:
            if (now := attached()) != was:
                print("attached" if now else "alone", flush=True)
            was = now
            time.sleep(0.02)
        """
    )
    log = RunFolder(cli.run_folder(run_id)).live_log(0)

    def seen(*words: str) -> None:
        wait_until(lambda: log.exists() and log.read_text().split() == [*words], " ".join(words), timeout_s=120)

    seen("alone")
    with cli.start("exec", run_id, "--", "cat", stdin=subprocess.PIPE) as shell:
        seen("alone", "attached")
        shell.communicate("", timeout=120)
    seen("alone", "attached", "alone")
    with cli.start("forward", run_id, free_port()) as tunnel:
        assert tunnel.stdout is not None
        assert "leads to port" in tunnel.stdout.readline()
        time.sleep(1)
        tunnel.send_signal(signal.SIGINT)
        tunnel.communicate(timeout=120)
    assert log.read_text().split() == ["alone", "attached", "alone"]
    cli("cancel", "--wait", run_id)


#: This program serves a page at a free port of the worker's node.
SERVER = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'"' + self.path.encode() + b'"')
    def log_message(self, *args): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("port", server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.promise("tunnel-reaches-worker-port")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_forward_prints_an_address_that_reaches_the_worker_until_a_signal_ends_it(cli: Cli, number: int) -> None:
    run_id = cli.submit(SERVER)
    log = RunFolder(cli.run_folder(run_id)).live_log(0)
    wait_until(lambda: log.exists() and "port" in log.read_text(), "its port", timeout_s=120)
    port = log.read_text().split()[1]

    def relays() -> list[int]:
        below = processes_below(cli.folder)
        return [pid for pid in below if any("remote/agent/" in word for word in processes.command_of(pid))]

    with cli.start("forward", run_id, port) as tunnel:
        assert tunnel.stdout is not None
        line = tunnel.stdout.readline()
        found = re.fullmatch(rf"(127\.0\.0\.1:\d+) leads to port {port} of rank 0's node. Ctrl-C closes it.\n", line)
        assert found is not None, line
        address = found[1]
        assert [fetched(f"http://{address}/{page}") for page in "ab"] == ["/a", "/b"]
        assert relays()
        tunnel.send_signal(number)
        out, err = tunnel.communicate(timeout=120)
    assert (tunnel.returncode, out, err) == (0 if number == signal.SIGINT else 143, "", "")
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetched(f"http://{address}/")
    wait_until(lambda: not relays(), "the relay on the node has ended", timeout_s=60)
    assert not [*(cli.run_folder(run_id) / "exec").glob("*/*")]
    assert cli.wait(run_id, "Running") == "Running"
    cli("cancel", "--wait", run_id)


def test_shell_session_has_the_run_variables_and_ends_with_its_shell(cli: Cli) -> None:
    process = cli.start("dev", "--shell", env={"SHELL": "/bin/sh"}, stdin=subprocess.PIPE)
    out, err = process.communicate("echo in $PACELINE_RUN_ID; exit 3\n", timeout=180)
    assert process.returncode == 3, err
    run_id = out.split()[1]
    assert cli.wait(run_id) == "Canceled"


@pytest.mark.skipif(shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="no sshd here")
def test_ssh_logs_in_to_the_session(cli: Cli) -> None:
    command = cli("dev", "--ssh").stdout.strip()
    run_id = command.split()[-1]
    try:
        assert (cli.run_folder(run_id) / "session" / "key").stat().st_mode & 0o77 == 0
        done = subprocess.run(
            [*command.split(), "-o", "BatchMode=yes", "echo $PACELINE_RUN_ID"],
            env=cli.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.stdout.strip() == run_id, done.stderr
    finally:
        cli("cancel", "--wait", run_id)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shell", "--ssh"), "a session is of one kind"),
        (("moon",), "no compute target 'moon'"),
        (("--run", "none_1_00000000"), "no run 'none_1_00000000'"),
        (("--idle", "soon"), "soon"),
    ],
)
def test_invalid_session_command_is_refused_and_starts_no_run(cli: Cli, words: tuple[str, ...], message: str) -> None:
    assert message in cli("dev", *words, code=2).stderr
    assert cli.run_ids() == []


def test_run_that_is_no_session_cannot_be_opened(cli: Cli) -> None:
    run_id = cli.submit("print(1)")
    cli.wait(run_id)
    assert "is not a session" in cli("dev", "--run", run_id, code=2).stderr
    assert "is not a session" in cli("dev", "--resume", run_id, code=2).stderr


def test_opening_a_session_refuses_options_of_a_new_one_and_an_ended_session(cli: Cli) -> None:
    run_id = cli("dev", "--shell", "-d").stdout.strip()
    cli("cancel", "--wait", run_id)
    for words in (("gpu2",), ("--idle", "2h"), ("--resume", run_id), ("--gpu",), ("--pip", "numpy")):
        assert f"leave out {words[0].replace('gpu2', 'target')}" in cli("dev", "--run", run_id, *words, code=2).stderr
    done = cli("dev", "local", "--run", run_id, code=1)
    assert done.stderr.endswith(f"Start another with its notebooks: paceline dev --resume {run_id}\n")


def test_notebook_session_without_jupyterlab_names_the_package_to_install(cli: Cli) -> None:
    if find_spec("jupyterlab"):
        pytest.skip("JupyterLab is installed here")
    done = cli("dev", code=1)
    assert "paceline dev --pip jupyterlab" in done.stderr
