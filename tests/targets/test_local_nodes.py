from __future__ import annotations

import os
import signal
import sys

import pytest

from paceline.job.plan import Command, Node, ProcessExit
from paceline.runs.folder import RunFolder
from paceline.targets.local_nodes import LocalNodes
from tests.helpers import wait_until


@pytest.fixture
def given_back():
    return []


@pytest.fixture
def nodes(given_back):
    node = Node(node_rank=0, name="local", address="127.0.0.1", cores=1)
    return LocalNodes((node,), (1, 2), lambda: given_back.append("nodes"))


def wait_for_end(nodes, pid) -> ProcessExit:
    found: list[ProcessExit] = []
    wait_until(lambda: found.extend(nodes.ended()) or found, "the end")
    assert [(ended.pid, ended.node_rank) for ended in found] == [(pid, 0)]
    return found[0]


def start(nodes, tmp_path, code, **values):
    """The exit code and the log of a command that is started."""
    work_dir = tmp_path / "work"
    work_dir.mkdir(exist_ok=True)
    shell = values.pop("shell", {"PATH": os.environ["PATH"]})
    command = Command(argv=(sys.executable, "-c", code), log=tmp_path / "log", **values)
    started = nodes.start(command, work_dir, shell)
    assert started.command == command
    ended = wait_for_end(nodes, started.pid)
    return ended.exit_code, (tmp_path / "log").read_text()


def test_stdout_and_stderr_of_a_command_go_to_its_log(nodes, tmp_path):
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    assert start(nodes, tmp_path, code) == (3, "out\nerr\n")
    assert start(nodes, tmp_path, "print('again')") == (0, "out\nerr\nagain\n")


def test_command_runs_in_its_working_directory_with_empty_stdin(nodes, tmp_path):
    code = "import os, sys; print(os.getcwd(), repr(sys.stdin.read()))"
    assert start(nodes, tmp_path, code)[1] == f"{tmp_path / 'work'} ''\n"


def test_shell_variables_override_defaults_but_not_those_of_the_command(nodes, tmp_path):
    code = "import os; print(*(os.environ.get(name) for name in 'ABCD'), os.environ.get('PACELINE_LEASES'))"
    values = {"defaults": {"A": "default", "B": "default"}, "environment": {"C": "command", "B": "command"}}
    shell = {"PATH": os.environ["PATH"], "A": "shell", "C": "shell", "D": "shell"}
    assert start(nodes, tmp_path, code, shell=shell, **values)[1] == "shell command command shell None\n"


def test_started_command_is_the_leader_of_its_own_session(nodes, tmp_path):
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))"
    assert start(nodes, tmp_path, code)[1] == "True\n"


def test_worker_inherits_no_open_files(nodes, tmp_path):
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:4])"
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's /proc")
    with open(tmp_path / "open", "w"):
        assert start(nodes, tmp_path, code)[1] == "[0, 1, 2, 3]\n"  # 3 is the descriptor of the listing itself


def test_missing_program_raises_file_not_found(nodes, tmp_path):
    command = Command(argv=("no-such-program",), log=tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        nodes.start(command, tmp_path, {"PATH": "/bin"})


def test_argument_with_a_null_byte_raises_os_error(nodes, tmp_path):
    # Regression: `start` raised a ValueError, which none of its callers handles.
    with pytest.raises(OSError, match="null"):
        nodes.start(Command(argv=("echo", "a\0b"), log=tmp_path / "log"), tmp_path, {"PATH": "/bin:/usr/bin"})


def test_signal_returns_whether_the_process_was_alive(nodes, tmp_path):
    command = Command(argv=("sleep", "60"), log=tmp_path / "log")
    started = nodes.start(command, tmp_path, {"PATH": os.environ["PATH"]})
    assert nodes.is_alive(started.pid, 0)
    assert nodes.signal(started.pid, 0, signal.SIGTERM) is True
    assert wait_for_end(nodes, started.pid).exit_code == 128 + signal.SIGTERM
    assert not nodes.is_alive(started.pid, 0)
    assert nodes.signal(started.pid, 0, signal.SIGTERM) is False


def test_killed_processes_are_reported_and_closing_removes_the_scratch_folder(nodes, tmp_path, given_back):
    folder = RunFolder(tmp_path / "runs" / "a_1_00000000")
    folder.path.mkdir(parents=True)
    seen = nodes.send(folder, tmp_path)
    assert (seen.scratch_dir.is_dir(), seen.run_dir, seen.is_shared) == (True, folder.path, True)
    started = nodes.start(Command(argv=("sleep", "60"), log=tmp_path / "log"), tmp_path, {"PATH": os.environ["PATH"]})
    nodes.kill_all()
    assert wait_for_end(nodes, started.pid).exit_code == 128 + signal.SIGKILL
    assert (nodes.lost(), nodes.is_disk_full(), nodes.shell(0)) == ({}, False, None)
    nodes.close()
    assert not seen.scratch_dir.exists()
    assert given_back == ["nodes"]


def test_renewing_the_ports_of_local_nodes_takes_new_ports_from_the_target():
    nodes = LocalNodes((), (1, 2), lambda: None, lambda: (3, 4))
    nodes.renew_ports()
    assert nodes.ports == (3, 4)
