from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys

import pytest

from paceline.system import processes
from tests.helpers import run_python, start_python, wait_until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")

#: This program starts a child in a separate session. The child starts another process. Both pids are printed, and all wait.
TREE = '''
import os, subprocess, sys, time
inner = """
import subprocess, time
print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)
time.sleep(60)
"""
child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
time.sleep(60)
'''


def end(*pids: int) -> None:
    for pid in pids:
        processes.send(pid, signal.SIGKILL)


def test_descendants_of_a_process_are_its_children_and_grandchildren():
    with start_python(TREE) as process:
        child, grandchild = map(int, process.stdout.readline().split())
        try:
            assert sorted(processes.descendants(process.pid)) == sorted([child, grandchild])
            assert processes.descendants(grandchild) == []
        finally:
            end(grandchild, child, process.pid)


def test_childless_process_is_recognized_without_reading_the_process_table():
    """A machine may have thousands of processes, and a run's end searches them four times."""
    code = """
import os
from paceline.system import processes
processes._table = None
print(processes.descendants(os.getpid()), processes.kill_descendants(os.getpid()))
"""
    assert run_python(code) == "[] 0\n"


def test_supervisor_of_another_run_is_not_counted_as_a_descendant():
    code = """
import os, subprocess, time
worker = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"]})
print(worker.pid, flush=True)
time.sleep(60)
"""
    with start_python(code, environment={processes.SUPERVISOR_VARIABLE: "digits_1_0"}) as supervisor:
        worker = int(supervisor.stdout.readline())
        try:
            wait_until(lambda: processes.descendants(supervisor.pid) == [worker], "its own worker, which it sees")
            assert not {supervisor.pid, worker} & set(processes.descendants(os.getpid()))
        finally:
            end(worker, supervisor.pid)


@linux
def test_process_between_fork_and_exec_is_a_descendant():
    """Regression: between fork and exec, a child has the supervisor's environment, so it counted as a supervisor. It
    was not killed, and became a worker."""
    code = """
import os, signal
from paceline.system import processes
pid = os.fork()
if not pid:
    signal.alarm(100)  # where it is passed over
    os.read(os.pipe()[0], 1)
print(processes.descendants(os.getpid()) == [pid], processes.kill_descendants(os.getpid()))
"""
    said = run_python(code, environment={processes.SUPERVISOR_VARIABLE: "digits_1_0"})
    assert said == "True 1\n"


def test_a_zombie_is_neither_alive_nor_a_descendant():
    process = subprocess.Popen(["true"])
    wait_until(lambda: processes._state(process.pid) == "Z", "the child's end")
    assert not processes.is_alive(process.pid)
    assert process.pid not in processes.descendants(os.getpid())
    process.wait()


@linux
def test_children_of_a_process_with_a_dead_main_thread_are_found():
    """Its first thread has ended, so it looks like a zombie; it keeps its children until its last thread ends."""
    code = """
import ctypes, os, subprocess, threading, time
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
    with start_python(code) as process:
        child = int(process.stdout.readline())
        try:
            wait_until(lambda: processes._state(process.pid) == "Z", "the end of the first thread")
            assert child in processes.descendants(os.getpid())
        finally:
            end(child, process.pid)


def test_child_whose_parent_ends_during_the_scan_is_found(monkeypatch):
    tables = iter([[(9, 5, "S"), (1, 0, "S"), (4, 1, "S")], [(9, 4, "S"), (1, 0, "S"), (4, 1, "S")]])
    monkeypatch.setattr(processes, "_table", lambda: next(tables))
    assert processes.descendants(4) == [9]


def test_is_alive_returns_false_once_a_process_has_ended():
    process = subprocess.Popen(["sleep", "60"])
    assert processes.is_alive(process.pid)
    process.kill()
    process.wait()
    assert not processes.is_alive(process.pid)


@linux
def test_killed_process_is_ending_before_its_parent_can_reap_it():
    process = subprocess.Popen(["sleep", "60"])
    assert not processes.is_ending(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert not processes.is_ending(process.pid)
    process.kill()
    assert processes.is_ending(process.pid)
    process.wait()
    assert processes.is_ending(process.pid)


def test_living_process_is_not_ending_on_systems_without_proc(monkeypatch):
    monkeypatch.setattr(processes, "_LINUX", False)
    monkeypatch.setattr(processes, "_state", lambda pid: "S")
    monkeypatch.setattr(processes, "stat_of", lambda pid: None)
    assert not processes.is_ending(os.getpid())


@linux
def test_process_name_with_parentheses_and_spaces_is_parsed(tmp_path):
    program = tmp_path / "a) S (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    try:
        wait_until(lambda: processes.is_alive(process.pid), "the process")
        assert process.pid in processes.descendants(os.getpid())
    finally:
        process.kill()
        process.wait()


def test_killing_descendants_also_kills_processes_in_other_sessions():
    code = f"""
import os, subprocess, sys
from paceline.system import processes
tree = subprocess.Popen([sys.executable, "-c", {TREE!r}], stdout=subprocess.PIPE, text=True)
pids = [tree.pid, *map(int, tree.stdout.readline().split())]
print(processes.kill_descendants(os.getpid()), any(map(processes.is_alive, pids)))
"""
    assert run_python(code) == "3 False\n"


@linux
def test_subreaper_adopts_orphans():
    code = """
import os, subprocess, time
from paceline.system import processes
processes.become_subreaper()
shell = subprocess.run(["sh", "-c", "sleep 60 > /dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
orphan = int(shell.stdout)
print(processes.descendants(os.getpid()) == [orphan], processes.kill_descendants(os.getpid()), processes.is_alive(orphan))
"""
    assert run_python(code) == "True 1 False\n"


def test_a_process_that_keeps_forking_is_killed_with_its_children():
    code = """
import os, subprocess, sys, time
from paceline.system import processes
processes.become_subreaper()
fork = "import subprocess\\nwhile True: subprocess.Popen(['sleep', '60'])"
subprocess.Popen([sys.executable, "-c", fork], stderr=subprocess.DEVNULL)
while len(processes.descendants(os.getpid())) < 10: time.sleep(0.01)
print(processes.kill_descendants(os.getpid()) >= 10, processes.descendants(os.getpid()))
"""
    assert run_python(code) == "True []\n"


@linux
def test_processes_are_found_only_by_the_complete_name_and_value_of_a_variable():
    values = ("/runs/a", "/runs/ab", "/runs/a")
    started = [subprocess.Popen(["sleep", "60"], env={**os.environ, "PL_TEST": value}) for value in values[:2]]
    started.append(subprocess.Popen(["sleep", "60"], env={"PL_TEST": values[2], **os.environ}))
    try:
        one, other, two = started
        wait_until(lambda: len(processes.with_variable("PL_TEST", "/runs/a")) == 2, "the processes")
        assert sorted(processes.with_variable("PL_TEST", "/runs/a")) == sorted([one.pid, two.pid])
        assert processes.with_variable("L_TEST", "/runs/a") == []
        for process in (one, two):  # they stay zombies until this test waits for them
            process.kill()
            process.wait()
        assert processes.with_variable("PL_TEST", "/runs/a") == []
        assert processes.is_alive(other.pid)
    finally:
        for process in started:
            process.kill()
            process.wait()


@linux
def test_process_between_fork_and_exec_is_found_by_its_variable(monkeypatch):
    """On a busy machine, /proc has neither its variables nor its command line for a moment. An agent that ended then left behind
    what an engine had just started."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "PL_TEST": "first"})
    read, looks = processes._read, iter(["environ", "cmdline"] * 2)

    def not_yet(pid, name):
        return b"" if pid == process.pid and name == next(looks, None) else read(pid, name)

    monkeypatch.setattr(processes, "_read", not_yet)
    # Raise this time limit, because a busy machine may stop this process between two reads.
    monkeypatch.setattr(processes, "_EXEC_S", 60)
    try:
        assert processes.with_variable("PL_TEST", "first") == [process.pid]
        assert next(looks, None) is None
    finally:
        end(process.pid)
        process.wait()


@linux
def test_process_with_an_empty_environment_is_read_without_waiting(monkeypatch):
    monkeypatch.setattr(processes, "_EXEC_S", 60)
    process = subprocess.Popen(["sleep", "60"], env={})
    try:
        wait_until(lambda: processes.command_of(process.pid), "it has its command line")
        assert processes.environment_of(process.pid) == {}
    finally:
        end(process.pid)
        process.wait()


@linux
def test_killing_by_a_variable_spares_other_processes():
    mine, other = (subprocess.Popen(["sleep", "60"], env={**os.environ, "PL_TEST": v}) for v in ("a", "b"))
    try:
        wait_until(lambda: processes.with_variable("PL_TEST", "a"), "the process")
        assert processes.kill_with_variable("PL_TEST", "a") == 1
        assert mine.wait() == -signal.SIGKILL
        assert processes.is_alive(other.pid)
    finally:
        end(mine.pid, other.pid)
        other.wait()


@linux
def test_killing_the_processes_of_a_run_spares_the_supervisor_of_a_run_that_it_submitted():
    # Regression: a script of run a submits run b. The supervisor of b inherits PACELINE_RUN_DIR of run a. So it was
    # killed together with the remaining processes of run a.
    environment = {**os.environ, "PACELINE_RUN_DIR": "/runs/a", processes.SUPERVISOR_VARIABLE: "b_1_0"}
    supervisor = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        wait_until(lambda: processes._has_variable(supervisor.pid, "PACELINE_RUN_DIR", "/runs/a"), "the process")
        assert processes.kill_with_variable("PACELINE_RUN_DIR", "/runs/a", wait_s=1) == 0
        assert supervisor.poll() is None
    finally:
        supervisor.kill()
        supervisor.wait()


def test_reap_returns_the_exit_code_of_each_ended_child():
    code = """
import os, subprocess, time
from paceline.system import processes
started = [subprocess.Popen(["sh", "-c", text]) for text in ("exit 3", "kill -9 $$")]
seen = {}
while len(seen) < 2: seen.update(processes.reap())
print([processes.shell_exit_code(seen[p.pid]) for p in started], processes.reap())
for p in started: p.returncode = 0
"""
    assert run_python(code) == "[3, 137] []\n"


def test_sending_a_signal_to_a_dead_process_returns_false():
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.send(process.pid, signal.SIGTERM) is False


def test_signal_sent_to_a_living_process_is_delivered():
    process = subprocess.Popen(["sleep", "60"])
    assert processes.send(process.pid, signal.SIGTERM) is True
    assert process.wait() == -signal.SIGTERM


@linux
def test_boot_id_of_the_machine_is_equal_at_two_calls():
    assert len(processes.boot_id()) == 36
    assert processes.boot_id() == processes.boot_id()


def test_missing_home_variable_is_set_from_the_user_database():
    assert processes.with_home({"HOME": "/x", "A": "b"}) == {"HOME": "/x", "A": "b"}
    for without in ({"A": "b"}, {"HOME": "", "A": "b"}):
        assert processes.with_home(without) == {"HOME": pwd.getpwuid(os.geteuid()).pw_dir, "A": "b"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_processes_that_write_into_a_folder_are_killed_but_not_readers(tmp_path):
    log, other = tmp_path / "run" / "rank_0.log", tmp_path / "runs" / "rank_0.log"
    for path in (log, other):
        path.parent.mkdir()
        path.touch()
    # Start a daemon as `env -i setsid sleep` does. Only its open output file shows that it belongs to the run.
    apart = {"env": {}, "start_new_session": True, "cwd": "/"}
    with open(log, "a") as written, open(log) as read, open(other, "a") as elsewhere:
        daemon = subprocess.Popen(["/bin/sleep", "600"], stdout=written, **apart)
        quiet = subprocess.Popen(["/bin/sleep", "600"], stdout=subprocess.DEVNULL, stderr=written, **apart)
        reader = subprocess.Popen(["/bin/sleep", "600"], stdin=read, stdout=read, stderr=subprocess.DEVNULL, **apart)
        stranger = subprocess.Popen(["/bin/sleep", "600"], stdout=elsewhere, stderr=subprocess.DEVNULL, **apart)
    try:
        assert processes.kill_writers(str(tmp_path / "run")) == 2
        assert (daemon.wait(60), quiet.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert (reader.poll(), stranger.poll()) == (None, None)
    finally:
        for process in (reader, stranger):
            process.kill()
            process.wait()
