from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from paceline.errors import TargetError
from paceline.plan import Command
from paceline.runs import lock
from paceline.targets import local
from paceline.targets.local import LocalTarget, core_count
from tests.helpers import make_job


@pytest.fixture
def target(monkeypatch):
    """This machine, as if it had eight cores."""
    monkeypatch.setattr(local, "core_count", lambda: 8)
    return LocalTarget()


# --- nodes


def nodes(granted):
    return [(node.node_rank, node.name, node.address, node.cores, node.gpus) for node in granted.nodes]


def test_one_node_is_the_machine(target):
    granted = target.preview(make_job())
    assert nodes(granted) == [(0, "local", "127.0.0.1", 8, ())]
    assert len(granted.ports) == 2


def test_several_nodes_are_stand_ins_that_share_its_cores(target):
    granted = target.preview(make_job(distributed_backend="gloo", node_count=3))
    assert nodes(granted) == [(rank, f"local-{rank}", "127.0.0.1", 2, ()) for rank in range(3)]


def test_every_node_has_a_core_at_least(target):
    granted = target.preview(make_job(distributed_backend="gloo", node_count=20))
    assert {node.cores for node in granted.nodes} == {1}


def test_each_node_gets_a_gpu_for_each_of_its_workers(target, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "4,5,6,7,8")
    granted = target.preview(make_job(use_gpu=True, distributed_backend="nccl", node_count=2, process_count_per_node=2))
    assert [node.gpus for node in granted.nodes] == [("4", "5"), ("6", "7")]


def test_a_job_without_use_gpu_gets_none(target, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "0,1")
    assert [node.gpus for node in target.preview(make_job()).nodes] == [()]


def test_uneven_nodes_get_the_gpus_of_their_workers(target, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "0,1,2")
    job = make_job(use_gpu=True, distributed_backend="ps", worker_count=2, parameter_server_count=1, node_count=2)
    assert [node.gpus for node in target.preview(job).nodes] == [("0", "1"), ("2",)]


def test_tensorflow_gets_a_port_for_each_worker(target):
    job = make_job(distributed_backend="tensorflow", process_count_per_node=3)
    assert len(target.preview(job).ports) == 5


def test_a_preview_holds_nothing(target, tmp_path):
    target.preview(make_job())
    assert list(tmp_path.iterdir()) == []


def test_the_cores_are_those_that_this_process_may_run_on():
    assert core_count() == (len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count())


# --- what it can never hold


@pytest.mark.parametrize(
    ("gpus", "workers", "said"),
    [
        ("", 1, "has no GPUs. Set use_gpu=False"),
        ("0", 2, "has 1 GPU. Ask for at most 1 worker"),
        ("0,1", 3, "has 2 GPUs. Ask for at most 2 workers"),
    ],
)
def test_more_gpus_than_there_are_is_refused(target, monkeypatch, gpus, workers, said):
    monkeypatch.setenv("PACELINE_GPUS", gpus)
    with pytest.raises(TargetError) as refused:
        target.check(make_job(use_gpu=True, distributed_backend="nccl", process_count_per_node=workers))
    assert said in str(refused.value)
    assert f"{workers} worker" in str(refused.value)


def test_more_workers_than_cores_are_let_in(target):
    target.check(make_job(distributed_backend="gloo", process_count_per_node=100))


# --- waiting


@pytest.fixture
def run(tmp_path):
    """Makes the folder of a run that is looked after."""
    fds = []

    def make(name: str) -> Path:
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        fds.append(lock.take(path / "lock"))
        return path

    yield make
    for fd in fds:
        os.close(fd)


def test_a_run_waits_until_there_is_room_and_is_told_for_whom(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    first, second = run("first"), run("second")
    target.enqueue(job, first)
    target.enqueue(job, second)
    assert target.wait_for_nodes(job, first, pytest.fail) is not None
    told: list[str] = []

    def waiting(text):
        told.append(text)
        if len(told) == 3:
            target.release(first)
        return False

    granted = target.wait_for_nodes(job, second, waiting)
    assert [node.name for node in granted.nodes] == ["local"]
    assert set(told) == {"waits for 1 run (first)"}


def test_a_run_that_gives_up_gets_nothing(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    for name in ("first", "second"):
        target.enqueue(job, run(name))
    target.wait_for_nodes(job, Path("runs/first").absolute(), lambda text: True)
    assert target.wait_for_nodes(job, Path("runs/second").absolute(), lambda text: True) is None


def test_of_many_runs_ahead_some_are_named(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    for name in ("a", "b", "c", "d", "last"):
        path = run(name)
        target.enqueue(job, path)
    told: list[str] = []
    target.wait_for_nodes(job, path, lambda text: bool(told.append(text)) or True)
    assert told == ["waits for 4 runs (a, b, c, ...)"]


# --- starting


def start(target, tmp_path, code, **values):
    """The exit code and the log of a command that is started."""
    work_dir = tmp_path / "work"
    work_dir.mkdir(exist_ok=True)
    shell = values.pop("shell", {"PATH": os.environ["PATH"]})
    command = Command(argv=(sys.executable, "-c", code), log=tmp_path / "log", **values)
    started = target.start(command, work_dir, shell)
    assert started.command == command
    _, status = os.waitpid(started.pid, 0)
    return os.waitstatus_to_exitcode(status), (tmp_path / "log").read_text()


def test_output_and_errors_go_to_the_log(target, tmp_path):
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    assert start(target, tmp_path, code) == (3, "out\nerr\n")
    assert start(target, tmp_path, "print('again')") == (0, "out\nerr\nagain\n")


def test_a_command_runs_in_its_working_directory_without_input(target, tmp_path):
    code = "import os, sys; print(os.getcwd(), repr(sys.stdin.read()))"
    assert start(target, tmp_path, code)[1] == f"{tmp_path / 'work'} ''\n"


def test_the_shell_s_variables_stand_over_defaults_and_under_the_command_s(target, tmp_path):
    code = "import os; print(*(os.environ.get(name) for name in 'ABCD'), os.environ.get('PACELINE_LEASES'))"
    values = {"defaults": {"A": "default", "B": "default"}, "environment": {"C": "command", "B": "command"}}
    shell = {"PATH": os.environ["PATH"], "A": "shell", "C": "shell", "D": "shell"}
    assert start(target, tmp_path, code, shell=shell, **values)[1] == "shell command command shell None\n"


def test_a_command_is_the_first_of_its_session(target, tmp_path):
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))"
    assert start(target, tmp_path, code)[1] == "True\n"


def test_no_file_of_ours_is_open_in_it(target, tmp_path):
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:4])"
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's /proc")
    with open(tmp_path / "open", "w"):
        assert start(target, tmp_path, code)[1] == "[0, 1, 2, 3]\n"  # the fourth is the listing itself


def test_a_program_that_is_not_there_is_an_error(target, tmp_path):
    command = Command(argv=("no-such-program",), log=tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        target.start(command, tmp_path, {"PATH": "/bin"})


def test_a_signal_arrives_or_is_told_to_be_late(target, tmp_path):
    command = Command(argv=("sleep", "60"), log=tmp_path / "log")
    started = target.start(command, tmp_path, {"PATH": os.environ["PATH"]})
    assert target.signal(started.pid, 0, signal.SIGTERM) is True
    _, status = os.waitpid(started.pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert target.signal(started.pid, 0, signal.SIGTERM) is False
