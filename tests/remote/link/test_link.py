from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from paceline.remote.link import LinkError
from paceline.remote.link.link import StartedEnd
from paceline.system import processes
from tests.helpers import fill_disk, wait_until, write_tree


def ended(link, count: int = 1) -> list[tuple[int, int]]:
    """(pid, exit code) of the first `count` ends."""
    found: list[StartedEnd] = []
    wait_until(lambda: found.extend(link.ends()) or len(found) >= count, "the ends")
    return [(end.pid, end.code) for end in found]


@pytest.fixture
def link(open_link):
    return open_link()


def test_node_link_run_returns_exit_code_stdout_and_stderr_of_the_command(link):
    done = link.run(["sh", "-c", "cat; echo $HOME >&2; exit 3"], input=b"\0in")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"\0in", f"{os.environ['HOME']}\n".encode())


def test_function_called_over_the_link_returns_its_result_and_a_missing_function_raises_os_error(link):
    assert link.call("json:loads", '{"a": [1]}') == {"a": [1]}
    with pytest.raises(OSError, match="has no attribute 'no_such'"):
        link.call("json:no_such", {})
    with pytest.raises(OSError, match=r"No module named 'paceline\.nowhere'"):
        link.call("paceline.nowhere:f", {})


def test_callback_is_called_when_a_command_started_over_the_link_ends(link, tmp_path):
    told = threading.Event()
    link.on_end = told.set
    link.start(["true"], env={}, cwd="", log=str(tmp_path / "log"))
    assert told.wait(60)
    assert len(link.ends()) == 1


def test_command_over_its_timeout_is_killed(link):
    mark = f"6{os.getpid()}"  # a number of seconds that no other process sleeps
    with pytest.raises(LinkError, match=r"node-0: no answer to .*sh -c .* within 2 s"):
        link.run(["sh", "-c", f"exec sleep {mark}"], timeout_s=2)

    def running() -> list[str]:
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in processes.command_of(int(pid))]

    wait_until(lambda: not running(), "its end")


def test_command_runs_with_its_environment_and_writes_to_its_log(link, tmp_path, monkeypatch):
    log = tmp_path / "log file\n"
    log.write_text("before\n")
    pid = link.start(
        ["sh", "-c", 'echo "$A-$HOME"; echo err >&2; pwd; exec 3<&0; exit 5'],
        env={"A": "'\"$(x)\n"},
        cwd=str(tmp_path),
        log=str(log),
    )
    assert ended(link) == [(pid, 5)]
    assert log.read_text() == f"before\n'\"$(x)\n-{os.environ['HOME']}\nerr\n{tmp_path}\n"
    assert link.ends() == []


def test_command_with_an_exact_environment_inherits_no_variables(link, tmp_path):
    link.start(["/usr/bin/env"], env={"A": "a"}, cwd="", log=str(tmp_path / "log"), exact=True)
    ended(link)
    assert (tmp_path / "log").read_text() == "A=a\n"


@pytest.mark.parametrize(
    ("values", "error", "named"),
    [
        ({"argv": ["/no/program"]}, FileNotFoundError, "/no/program"),
        ({"cwd": "/no/folder"}, FileNotFoundError, "/no/folder"),
        ({"log": "/no/folder/log"}, FileNotFoundError, "/no/folder/log"),
        ({"argv": ["/etc/passwd"]}, PermissionError, "/etc/passwd"),
        ({"argv": ["echo", "a\0b"]}, OSError, "null"),
    ],
)
def test_command_that_can_not_start_on_a_node_raises_with_the_missing_path(link, tmp_path, values, error, named):
    given = {"argv": ["true"], "env": {}, "cwd": str(tmp_path), "log": str(tmp_path / "log")} | values
    with pytest.raises(error, match=named):
        link.start(given.pop("argv"), **given)


def test_node_link_sends_signals_only_to_processes_that_it_started_and_their_children(link, tmp_path):
    script = "trap 'exit 7' TERM; sleep 600 & echo $! > pid; mv pid child; while :; do sleep 0.01; done"
    pid = link.start(["sh", "-c", script], env={}, cwd=str(tmp_path), log=str(tmp_path / "log"))
    wait_until((tmp_path / "child").exists, "the child")
    child = int((tmp_path / "child").read_text())
    assert not link.signal(os.getpid(), 0)
    assert link.signal(child, signal.SIGKILL)
    assert link.signal(pid, signal.SIGTERM)
    assert ended(link) == [(pid, 7)]
    assert not link.signal(pid, signal.SIGTERM)
    assert not link.is_alive(pid)
    assert link.is_alive(os.getpid())


def test_kill_all_request_kills_all_processes_started_over_the_link_but_not_the_agent(link, tmp_path):
    script = "setsid sh -c 'setsid sleep 600 & echo $! > pid; mv pid child'; sleep 600"
    pid = link.start(["sh", "-c", script], env={}, cwd=str(tmp_path), log=str(tmp_path / "log"))
    wait_until((tmp_path / "child").exists, "the child")
    link.answer(link.send("kill_all", {}), "kill_all", 60.0)
    assert ended(link) == [(pid, 137)]
    wait_until(lambda: not link.is_alive(int((tmp_path / "child").read_text())), "the child has ended")
    assert link.run(["echo", "here"]).stdout == b"here\n"


def start_beside(run_id: str) -> subprocess.Popen[str]:
    """Start a process of a run without an agent, and a child of it, whose pid is its first line."""
    # At its end, the shell waits for a line of input. So it does not end if its child is killed first.
    script = "env -i sleep 60 & echo $!; wait; read -r _"
    environment = {**os.environ, "PACELINE_RUN_ID": run_id}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(["sh", "-c", script], env=environment, text=True, **pipes)
    # Popen returns a moment before the kernel has set the variables of the new program.
    wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "the variables")
    return process


def test_adopting_a_run_kills_its_old_processes_and_lets_the_agent_signal_its_new_processes(link):
    before, of_another = start_beside("adopted"), start_beside("another")
    after: list[subprocess.Popen[str]] = []
    try:
        assert not link.signal(before.pid, signal.SIGCONT)
        link.adopt("adopted")
        assert before.wait(120) == -signal.SIGKILL, "left by an agent before this one"
        after.append(start_beside("adopted"))
        assert after[0].stdout is not None
        child = int(after[0].stdout.readline())
        assert link.signal(after[0].pid, signal.SIGCONT)
        assert not link.signal(of_another.pid, signal.SIGCONT)
        link.answer(link.send("kill_all", {}), "kill_all", 60.0)
        assert after[0].wait(120) == -signal.SIGKILL
        wait_until(lambda: not processes.is_alive(child), "its child is gone, though nothing in it names the run")
        after.append(start_beside("adopted"))
        link.close()
        assert after[1].wait(120) == -signal.SIGKILL
        assert of_another.poll() is None
    finally:
        for process in (before, of_another, *after):
            for child in processes.descendants(process.pid):
                processes.send(child, signal.SIGKILL)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def test_command_on_a_closed_link_raises_without_reporting_a_lost_node(link, monkeypatch):
    """Also where the agent is gone before this side has gone on to close its own: it counted as lost then."""
    connection = link._connection
    close = connection.close
    monkeypatch.setattr(connection, "close", lambda wait_s: connection._over.wait(60) and close(wait_s))
    link.close()
    link.close()
    with pytest.raises(LinkError, match="node-0: the link is closed"):
        link.run(["true"])
    assert link.lost is None


def test_link_copies_files_and_trees_to_the_node(link, tmp_path):
    source = write_tree(
        tmp_path / "source", {"a b\n/größe": b"\0" * 700_000, "x": "1", "skip": "", os.fsdecode(b"\xff"): "2"}
    )
    (source / "link").symlink_to("x")
    (source / "x").chmod(0o500)
    there = tmp_path / "there/tree"
    link.put_tree(source, str(there), skip=lambda name: name == "skip")
    assert (there / "a b\n/größe").read_bytes() == b"\0" * 700_000
    assert os.stat(there / "x").st_mtime_ns == os.stat(source / "x").st_mtime_ns
    assert os.stat(there / "x").st_mode == os.stat(source / "x").st_mode
    assert os.readlink(there / "link") == "x"
    assert not (there / "skip").exists()
    assert link.census(str(there)) == (4, 700_003)
    assert (there / os.fsdecode(b"\xff")).read_text() == "2"
    link.put_file(str(there / "new\nfile"), b"3", 0o600)
    assert ((there / "new\nfile").read_bytes(), os.stat(there / "new\nfile").st_mode & 0o777) == (b"3", 0o600)


def test_tree_copied_to_a_full_disk_raises_and_leaves_nothing(link, tmp_path, small_disk):
    source = write_tree(tmp_path / "source", {"a": b"\0" * 700_000, "b": b"\0" * 700_000, "c": b"\0" * 30_000_000})
    with pytest.raises(OSError, match="No space left"):
        link.put_tree(source, str(small_disk / "tree"))
    assert os.listdir(small_disk) == []
    fill_disk(small_disk)
    with pytest.raises(OSError, match="No space left"):
        link.put_file(str(small_disk / "file"), b"x" * 5000)
    assert os.listdir(small_disk) == ["filler"]


def test_node_link_reports_existing_files_disk_space_load_and_free_ports_of_its_node(link, tmp_path):
    (tmp_path / "token").write_text("t")
    assert link.sees(str(tmp_path / "token"), "t")
    assert not link.sees(str(tmp_path / "token"), "u")
    assert not link.sees(str(tmp_path / "none"), "t")
    assert (link.exists(str(tmp_path)), link.exists(str(tmp_path / "none"))) == (True, False)
    assert ask(link, "disk", path=str(tmp_path))[0] > 0
    assert ask(link, "oom_kills") >= 0
    assert len(set(link.free_ports(3))) == 3
    # Memory use is known at once. CPU use needs two measurements.
    assert ask(link, "load", gpus=[])["memory_gib"] > 0
    wait_until(lambda: "cpu_percent" in ask(link, "load", gpus=["0"]), "the kernel has counted")


def ask(link, op: str, **values):
    return link.answer(link.send(op, values), op, 60.0)["found"]


def test_scratch_folder_is_removed_when_the_link_to_the_agent_closes(open_link, short_path):
    link, path = open_link(), short_path / "scratch"
    link.make_scratch(str(path))
    assert os.stat(path).st_mode & 0o777 == 0o700
    link.close()
    assert not Path(path).exists()
