"""Commands that run once on each node, in the supervisor's words; the nodes are stand-ins whose commands have ended already."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.job.plan import Command, ProcessExit, RemotePaths, StartedCommand
from paceline.runs.folder import RunFolder
from paceline.supervisor.nodes import ThisHost, on_nodes
from paceline.system import processes
from paceline.system.files import write_json
from tests.helpers import make_job, make_launch, make_run, wait_until

TOLD = {"cause": "environment", "message": "the environment could not be built. All is in '/tmp/x/environments/1.log'."}


class Failing:
    """Two nodes, of which the second has failed."""

    code = 1

    def __init__(self, folder: RunFolder, lost: dict[int, str]) -> None:
        self.nodes = make_launch(make_job(), node_count=2).nodes
        self._folder, self._lost, self._ends = folder, lost, []

    def start(self, command, cwd, environment):
        self._folder.prepared(0).parent.mkdir(exist_ok=True)
        write_json(self._folder.prepared(command.node_rank), {"failure": TOLD} if command.node_rank else {})
        rank = command.node_rank
        self._ends.append(ProcessExit(pid=7 + rank, node_rank=rank, exit_code=rank and self.code, time=time.time()))
        return StartedCommand(command=command, pid=7 + rank)

    def ended(self):
        ends, self._ends = self._ends, []
        return ends

    def lost(self):
        return self._lost

    def shell(self, rank):
        return {}

    def kill_all(self):
        return 0

    def signal(self, pid, rank, number):
        return False

    def is_alive(self, pid, rank):
        return False


@pytest.fixture
def prepare(tmp_path):
    """The failure of a preparation, of nodes with these folders."""

    def run(*, is_shared: bool, lost: dict[int, str]):
        folder, fd = make_run(tmp_path / "runs")
        with open(fd, "rb"):
            path = Path("/node/run")
            seen = RemotePaths(
                run_dir=folder.path if is_shared else path,
                **dict.fromkeys(("work_dir", "scratch_dir", "library_dir"), path),
                python="python3",
                is_shared=is_shared,
            )
            wake = SimpleNamespace(heed=lambda nodes: None, sleep=lambda seconds: None)
            run = SimpleNamespace(folder=folder, wake=wake, job=make_job())
            return on_nodes(run, "prepare", [0, 1], Failing(folder, lost), seen).failure

    return run


def test_result_that_a_full_disk_has_not_stored_fails_the_preparation(prepare, monkeypatch):
    # Regression: the supervisor failed with the internal error "'NoneType' object is not subscriptable".
    monkeypatch.setattr(Failing, "code", 0)
    monkeypatch.setattr("tests.supervisor.test_nodes.write_json", lambda path, value: None)
    failure = prepare(is_shared=False, lost={})
    assert failure.cause == "disk"
    assert "node_0.json' of a node could not be stored here" in failure.message


def test_failure_on_a_disk_that_the_nodes_do_not_share_names_the_node(prepare):
    # Regression: with several hosts, the message "All that was printed is in '/tmp/...log'" did not say which host has
    # this file.
    failure = prepare(is_shared=False, lost={})
    assert (failure.cause, failure.node) == ("environment", "node-1")
    assert failure.message == f"On node node-1: {TOLD['message']}"


def test_failure_in_a_shared_folder_names_no_node(prepare):
    failure = prepare(is_shared=True, lost={})
    assert (failure.node, failure.message) == (None, TOLD["message"])


def test_failure_message_names_a_lost_node_once(prepare):
    failure = prepare(is_shared=False, lost={1: "node-1: nothing heard for 15 s."})
    assert (failure.cause, failure.message) == ("node_lost", "Node node-1 was lost: nothing heard for 15 s.")


# --- Checks on the supervisor's own machine


def command(folder: Path, code: str) -> Command:
    return Command(argv=(sys.executable, "-S", "-c", code), log=folder / "log")


def test_killing_all_workers_of_this_host_keeps_connections_to_other_nodes_alive(tmp_path: Path) -> None:
    # Regression: with the target `local`, the step that lists outputs killed all descendants of the supervisor, also
    # its ssh connections to the other nodes.
    with subprocess.Popen(["sleep", "60"]) as link:
        try:
            nodes = ThisHost()
            started = nodes.start(command(tmp_path, "import time; time.sleep(60)"), tmp_path, {})
            nodes.kill_all()
            assert not processes.is_alive(started.pid)
            assert processes.is_alive(link.pid)

            started = nodes.start(command(tmp_path, "raise SystemExit(3)"), tmp_path, {})
            ends = []
            wait_until(lambda: ends.extend(nodes.ended()) or ends, "its end is told")
            assert [(end.pid, end.exit_code) for end in ends] == [(started.pid, 3)]
            assert link.poll() is None
        finally:
            link.kill()
