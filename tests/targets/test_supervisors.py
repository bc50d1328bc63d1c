"""A supervisor that is loaded before its run is there."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from paceline.runs import states, store
from paceline.system import detached_process, processes
from paceline.system.detached_process import library_dir
from paceline.targets import supervisors
from paceline.targets.supervisors import Early
from tests.helpers import make_job, make_run, run_python, wait_until, write_tree

#: A module that a supervisor loads only for some targets.
MODULES = ("paceline.targets.ssh.allocate",)


def early(tmp_path: Path, run_dir: Path) -> Early:
    return Early(run_dir, library_dir(tmp_path / "ws"), sys.executable, MODULES)


def test_unused_prestarted_supervisor_ends_and_leaves_no_files(tmp_path: Path) -> None:
    waiting = early(tmp_path, tmp_path / "ws" / "runs" / "x_1")
    process = detached_process.started[-1]
    assert process.poll() is None
    waiting.drop()
    assert process.wait(90) == 0
    assert not (tmp_path / "ws" / "runs").exists()


def test_prestarted_supervisor_ends_with_its_parent_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from paceline.targets import supervisors\n"
        "from paceline.system import detached_process\n"
        f"early = supervisors.Early(Path({str(tmp_path)!r}) / 'x_1', Path({str(library_dir(tmp_path))!r}), sys.executable)\n"
        "print(detached_process.started[-1].pid, flush=True); os._exit(0)"
    )
    pid = int(run_python(code))
    wait_until(lambda: not processes.is_alive(pid), "the supervisor has ended")


def test_prestarted_supervisor_completes_its_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "ws" / "runs"
    folder, lock_fd = make_run(run_dir, job=make_job(), target="local")
    source = write_tree(tmp_path / "ws/snapshots/1", {"train.py": "print('done')"})
    folder.snapshot.symlink_to(source)
    waiting = early(tmp_path, folder.path)
    pid = waiting.begin(lock_fd)
    os.close(lock_fd)
    assert pid == detached_process.started[-1].pid
    assert detached_process.started[-1].wait(180) == 0, folder.driver_log.read_text()
    assert store.stored(folder).status == states.COMPLETED
    waiting.drop()  # dropping it again is harmless


def test_starting_a_run_with_a_killed_prestarted_supervisor_returns_none(tmp_path: Path) -> None:
    folder, lock_fd = make_run(tmp_path / "ws" / "runs", job=make_job(), target="local")
    waiting = early(tmp_path, folder.path)
    detached_process.started[-1].send_signal(signal.SIGKILL)
    detached_process.started[-1].wait(90)
    assert waiting.begin(lock_fd) is None
    os.close(lock_fd)


@pytest.mark.parametrize("is_killed", [False, True])
def test_run_begins_in_its_prestarted_supervisor_or_in_a_new_one_if_the_first_was_killed(
    tmp_path: Path, is_killed: bool
) -> None:
    """By another one where that has died meanwhile."""
    folder, lock_fd = make_run(tmp_path / "ws" / "runs", job=make_job(), target="local")
    folder.snapshot.symlink_to(write_tree(tmp_path / "ws/snapshots/1", {"train.py": ""}))
    library, before = library_dir(tmp_path / "ws"), len(detached_process.started)
    for _ in range(2):
        supervisors.load(folder.path, library, sys.executable, MODULES)
    loaded = detached_process.started[-1]
    assert len(detached_process.started) <= before + 1
    if is_killed:
        loaded.kill()
        loaded.wait(90)
    pid = supervisors.start(folder.path, lock_fd, library, sys.executable)
    os.close(lock_fd)
    assert (pid == loaded.pid) == (not is_killed)
    assert detached_process.started[-1].wait(180) == 0, folder.driver_log.read_text()
    assert store.stored(folder).status == states.COMPLETED


def test_ending_the_prestarted_supervisor_of_one_run_does_not_end_that_of_another_run(tmp_path: Path) -> None:
    library = library_dir(tmp_path / "ws")
    supervisors.load(tmp_path / "a", library, sys.executable, ())
    process = detached_process.started[-1]
    supervisors.drop(tmp_path / "b")
    assert process.poll() is None
    supervisors.drop(tmp_path / "a")
    assert process.wait(90) == 0


@pytest.fixture(autouse=True)
def _leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))


@pytest.mark.parametrize("is_changed", [False, True])
def test_run_uses_the_prestarted_supervisor_of_its_program_unless_environment_variables_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    library = library_dir(tmp_path / "ws")
    for _ in range(2):
        supervisors.load_ahead(library, sys.executable, MODULES)
    ahead = detached_process.started[-1]
    folder, lock_fd = make_run(tmp_path / "ws" / "runs", job=make_job(), target="local")
    code = "import os; print(os.environ.get('CHANGED'), os.environ['PACELINE_RUN_ID'])"
    folder.snapshot.symlink_to(write_tree(tmp_path / "ws/snapshots/1", {"train.py": code}))
    if is_changed:
        monkeypatch.setenv("CHANGED", "yes")
    supervisors.load(folder.path, library, sys.executable, MODULES)
    pid = supervisors.start(folder.path, lock_fd, library, sys.executable)
    os.close(lock_fd)
    assert (pid == ahead.pid) == (not is_changed)
    assert detached_process.started[-1].wait(180) == 0, folder.driver_log.read_text()
    assert store.stored(folder).status == states.COMPLETED
    assert folder.rank_log(1, 0).read_text().split() == ["yes" if is_changed else "None", folder.run_id]
    # The supervisor that was started in advance has ended, because its environment did not fit.
    assert ahead.wait(90) == 0


def test_prestarted_supervisor_ends_if_it_receives_no_run_within_its_time_limit() -> None:
    code = """
import socket
from paceline.supervisor import __main__ as supervisor
supervisor._AHEAD_S = 0.05
ours, theirs = socket.socketpair()
print(supervisor._wait_to_begin(None, theirs.detach(), ["--ahead"]))
try:
    ours.send(b"run")
except BrokenPipeError:
    print("refused")
"""
    assert run_python(code).split() == ["None", "refused"]


def test_run_sent_just_as_a_prestarted_supervisor_times_out_is_not_lost(tmp_path: Path) -> None:
    code = f"""
import os, socket, types
from paceline.supervisor import __main__ as supervisor
ours, theirs = socket.socketpair()
log = os.dup(1)
socket.send_fds(ours, [{os.fsencode(tmp_path)!r}], [os.open(os.devnull, os.O_RDONLY), log])
supervisor.select = types.SimpleNamespace(select=lambda *args: ([], [], []))
folder, lock_fd = supervisor._wait_to_begin(None, theirs.detach(), ["--ahead"])
print(folder.path, os.getcwd(), os.environ["PACELINE_SUPERVISOR"])
"""
    assert run_python(code).split() == [str(tmp_path), str(tmp_path), tmp_path.name]
