"""Sessions (`paceline dev`) on nodes of other machines: JupyterLab, a shell and ssh, each through one tunnel."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import RunStateError
from paceline.system import processes
from paceline.targets.configured import Configured, add
from tests.cli.conftest import Cli
from tests.engines.places import EACH, WAYS, Place, place
from tests.helpers import wait_until, write_tree
from tests.sessions.test_sessions import JUPYTERLAB, fetched, open_session


class There(Cli):
    """`paceline` with the workspace of a place, which has compute target `there`."""

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(folder)
        self.place = place
        self.environment |= {**os.environ, "PACELINE_WORKSPACE": str(place.lab.workspace_dir)}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        self._started.append(super().start(*words, env=env, **options))
        return self._started[-1]

    def run_ids(self) -> list[str]:
        return [path.name for path in self.place.lab.workspace_dir.glob("runs/[!.]*")]

    def end(self) -> None:
        """End what a failed test has left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for run_id in self.run_ids():
            with contextlib.suppress(RunStateError):
                pl.Run.get(pl.Workspace(self.place.lab.workspace_dir), run_id).cancel()

    def run_folder(self, run_id: str) -> Path:
        return self.place.lab.workspace_dir / "runs" / run_id

    def status(self, run_id: str) -> str:
        return str(self.json("show", run_id)["status"])

    def wait_for(self, run_id: str, status: str) -> None:
        wait_until(lambda: self.status(run_id) == status, f"{run_id} is {status}", 100)


@pytest.fixture(params=["slurm" if way.values == ("slurm",) else way for way in EACH])
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    assert WAYS
    folder = tmp_path / "source"
    folder.mkdir()
    with place(request.param, request, tmp_path, monkeypatch) as found:
        there = There(found, folder)
        try:
            yield there
        finally:
            there.end()


#: This program prints the addresses on which processes of the run listen, in the kernel's notation.
LISTENS = """
import glob, os
sockets = set()
for path in glob.glob("/proc/[0-9]*"):
    try:
        if f"PACELINE_RUN_ID={os.environ['PACELINE_RUN_ID']}" in open(f"{path}/environ").read().split("\\0"):
            sockets |= {os.readlink(fd) for fd in glob.glob(f"{path}/fd/*")}
    except OSError:
        pass
for kind in ("tcp", "tcp6"):
    for row in map(str.split, open(f"/proc/net/{kind}")):
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
            print(row[1].partition(":")[0])
"""


def left(run_id: str) -> list[str]:
    """Return the command lines of the run's processes, on all hosts."""
    return [" ".join(processes.command_of(pid)) for pid in processes.with_variable("PACELINE_RUN_ID", run_id)]


@pytest.mark.promise("session-is-a-run")
def test_notebook_session_on_a_node_stores_its_notebook_and_leaves_no_process_after_cancel(there: There) -> None:
    write_tree(there.folder, {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": JUPYTERLAB})
    process, run_id, url = open_session(there, "there", "--idle", "0")
    assert fetched(url) == "/lab"
    # Processes of other users know the address, but without the token they get no access.
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(url.partition("?")[0])
    assert there("exec", run_id, "--", sys.executable, "-c", LISTENS).stdout.split() == ["0100007F"]
    close(process, signal.SIGINT, 0)
    # Even if the client is killed, its tunnel on the node ends.
    process, same, again = open_session(there, "there", "--run", run_id)
    assert same == run_id
    assert fetched(again) == "/lab"
    assert any("relay.py" in line for line in left(run_id))
    close(process, signal.SIGKILL, -signal.SIGKILL)
    wait_until(lambda: not any("relay.py" in line for line in left(run_id)), "the tunnel has ended on the node", 90)
    process, _, again = open_session(there, "there", "--run", run_id)
    there("cancel", "--wait", run_id)
    close(process, None, 0)
    assert (there.run_folder(run_id) / "outputs" / "notebooks" / "new.ipynb").read_text() == "{}"
    wait_until(lambda: not left(run_id), "no process is left", 30)


def close(process: subprocess.Popen[str], number: int | None, code: int) -> None:
    """End `paceline dev` by a signal, or wait for its end, and check its exit code."""
    if number is not None:
        process.send_signal(number)
    _, told = process.communicate(timeout=180)
    assert process.returncode == code, told


@pytest.mark.parametrize("there", ["slurm"], indirect=True)
def test_requeued_session_keeps_its_address_and_notebook(there: There) -> None:
    write_tree(there.folder, {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": JUPYTERLAB})
    process, run_id, url = open_session(there, "there", "--idle", "0", "--max-restarts", "1")
    kept = there.run_folder(run_id) / "checkpoints" / "notebooks" / "new.ipynb"
    wait_until(kept.exists, "the notebook is kept", 60)
    job_id = json.loads((there.run_folder(run_id) / "engine.json").read_text())["job_id"]
    subprocess.run(["scontrol", "requeue", job_id], check=True)
    wait_until(lambda: there.json("show", run_id)["attempts"] == 2, "the session runs again", 120)
    there.wait_for(run_id, "Running")

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return fetched(url) == "/lab"
        return False

    wait_until(answers, "the address leads to the new server", 60)
    assert "1 notebooks of the earlier session are back" in there("logs", run_id).stdout
    there("cancel", "--wait", run_id)
    close(process, None, 0)


@pytest.mark.parametrize("there", ["slurm"], indirect=True)
def test_session_with_an_occupied_port_or_invalid_setting_starts_no_run(there: There) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = there("dev", "there", "--local", port, code=2).stderr
        assert f"port {port} of this machine can't be taken" in told
    add(
        there.place.lab.workspace_dir,
        Configured(name="there", kind="slurm", settings={"constraint": "moon"}),
        replace=True,
    )
    assert "Invalid feature specification" in there("dev", "there", code=2).stderr
    assert there.run_ids() == []


@pytest.mark.parametrize("there", ["slurm"], indirect=True)
def test_ctrl_c_while_waiting_for_a_queued_shell_session_cancels_the_session(there: There) -> None:
    # Let the Slurm job wait in the queue during the whole test.
    settings = {"options": ["--begin=now+1hour"], "time": "10"}
    add(there.place.lab.workspace_dir, Configured(name="there", kind="slurm", settings=settings), replace=True)
    process = there.start("dev", "there", "--shell")
    assert process.stderr is not None
    while "Slurm job" not in (line := process.stderr.readline()):
        assert line, "the session waits in the queue"
    close(process, signal.SIGINT, 130)
    (run_id,) = there.run_ids()
    there.wait_for(run_id, "Canceled")


def test_exit_from_a_shell_on_a_node_cancels_its_session(there: There) -> None:
    process = there.start("dev", "there", "--shell", env={"SHELL": "/bin/sh"}, stdin=subprocess.PIPE)
    out, err = process.communicate("echo in $PACELINE_RUN_ID on $(hostname); exit 3\n", timeout=300)
    assert process.returncode == 3, err
    _, run_id, _, node = out.split()
    assert node in there.place.hosts
    there.wait_for(run_id, "Canceled")


def test_session_on_a_node_ends_after_its_idle_limit(there: There) -> None:
    run_id = there("dev", "there", "--shell", "--idle", "1s", "-d").stdout.strip()
    there.wait_for(run_id, "Completed")
    assert "ends after 1 s without activity" in there("logs", run_id).stdout


@pytest.mark.skipif(shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="no sshd here")
def test_ssh_logs_in_to_a_session_on_a_node(there: There) -> None:
    command = there("dev", "there", "--ssh").stdout.split()
    run_id = command[-1]
    done = subprocess.run(
        [*command, "-o", "BatchMode=yes", "echo $PACELINE_RUN_ID on $(hostname)"],
        env=there.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    there("cancel", "--wait", run_id)
    found, _, node = done.stdout.split() or ("", "", done.stderr)
    assert (found, node in there.place.hosts) == (run_id, True), done
