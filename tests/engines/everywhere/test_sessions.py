"""Sessions (`paceline dev`) on nodes of other machines: JupyterLab, a shell and ssh, each through one tunnel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.engines.lab import processes_below
from tests.engines.places import EACH, WAYS, Place, place
from tests.helpers import wait_until, write_tree
from tests.sessions.test_sessions import JUPYTERLAB, fetched, open_session

pytestmark = pytest.mark.timeout(300)


class There(Cli):
    """`paceline` with the workspace of a place, which has compute target `there`."""

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(folder)
        self.place = place
        self.environment |= {**os.environ, "PACELINE_WORKSPACE": str(place.lab.workspace_dir)}

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
        yield There(found, folder)


@pytest.mark.promise("session-is-a-run")
def test_session_on_a_node_serves_keeps_its_notebook_and_ends(there: There) -> None:
    write_tree(there.folder, {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": JUPYTERLAB})
    process, run_id, url = open_session(there, "there", "--idle", "0")
    assert fetched(url) == "/lab"
    # Without the token the address is useless for a process of another user.
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(url.partition("?")[0])
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    other, same, again = open_session(there, "there", "--run", run_id)
    assert same == run_id
    assert fetched(again) == "/lab"
    there("cancel", "--wait", run_id)
    assert other.wait(60) == 0
    for one in (process, other):
        assert one.stdout is not None
        assert one.stderr is not None
        one.stdout.close()
        one.stderr.close()
    assert (there.run_folder(run_id) / "outputs" / "notebooks" / "new.ipynb").read_text() == "{}"


def test_shell_on_a_node_ends_its_session(there: There) -> None:
    process = there.start("dev", "there", "--shell", env={"SHELL": "/bin/sh"}, stdin=subprocess.PIPE)
    out, err = process.communicate("echo in $PACELINE_RUN_ID on $(hostname); exit 3\n", timeout=100)
    assert process.returncode == 3, err
    _, run_id, _, node = out.split()
    assert node in there.place.hosts
    there.wait_for(run_id, "Canceled")


def test_idle_session_on_a_node_ends(there: There) -> None:
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
        timeout=100,
        check=False,
    )
    there("cancel", "--wait", run_id)
    found, _, node = done.stdout.split() or ("", "", done.stderr)
    assert (found, node in there.place.hosts) == (run_id, True), done
