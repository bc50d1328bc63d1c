"""The program that keeps the books of a machine, run as a node's Python runs it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.remote.foreign_python import answer_in
from paceline.targets import host_leases as leases
from paceline.targets import leases as books
from paceline.targets import local_leases
from paceline.targets.local import ThisMachine
from paceline.targets.ssh.probe import host_program
from paceline.targets.status import host_status
from tests.helpers import make_job, old_python, write_program

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Asks the program, with the books in `tmp_path`."""

    def run(verb: str, environment: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-"],
            input=host_program(verb, given),
            capture_output=True,
            check=True,
            env={**os.environ, "PACELINE_LEASES": str(tmp_path / "leases"), **(environment or {})},
        )
        answer = answer_in(b"welcome!\n" + done.stdout + b"bye\n")
        assert answer is not None
        return answer

    return run


@pytest.fixture
def agents() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts stand-ins for agents."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    yield start
    for agent in started:
        agent.kill()
        agent.wait()


def ticket(key: str, agent: subprocess.Popen[bytes], cores: int = 1, gpus: int = 0, **values: Any) -> dict[str, Any]:
    asked = {"key": key, "run_id": f"run {key}", "pid": agent.pid, "cores": cores, "gpu_count": gpus}
    return asked | {"all_cores": 4, "all_gpus": ["0", "3"]} | values


def test_runs_share_a_machine_and_no_gpu_is_leased_twice(ask: Ask, agents: Any) -> None:
    first = ask("take", **ticket("1", agents(), cores=2, gpus=1))
    second = ask("take", **ticket("2", agents(), cores=2, gpus=1))
    third = ask("take", **ticket("3", agents(), cores=1))

    assert (first["granted"], second["granted"]) == ({"gpus": ["0"]}, {"gpus": ["3"]})
    assert "granted" not in third
    assert [holder["run_id"] for holder in third["holders"]] == ["run 1", "run 2"]


def test_older_submission_is_granted_first(ask: Ask, agents: Any) -> None:
    holder, old, young = agents(), agents(), agents()
    ask("take", **ticket("1", holder, cores=3))
    assert "granted" not in ask("take", **ticket("2", old, cores=4))
    assert ask("take", **ticket("3", young, cores=1))["ahead"][0]["run_id"] == "run 2"

    holder.kill()
    holder.wait()

    assert "granted" not in ask("take", **ticket("3", young, cores=1)), "there is room, but it is not its turn"
    assert ask("take", **ticket("2", old, cores=4))["granted"] == {"gpus": []}


def test_lease_request_that_does_not_wait_leaves_no_queue_ticket(ask: Ask, agents: Any) -> None:
    ask("take", **ticket("2", agents(), cores=4))
    assert "granted" not in ask("take", at_once=True, **ticket("1", agents()))

    assert [item["key"] for item in ask("look")["tickets"]] == ["2"]


def test_returned_lease_frees_its_cores(ask: Ask, agents: Any) -> None:
    holder = agents()
    ask("take", **ticket("1", holder, cores=4))
    assert ask("take", **ticket("1", holder, cores=4))["granted"] == {"gpus": []}, "asked again, the same"
    ask("give_back", key="1")
    ask("give_back", key="1")

    assert ask("look")["tickets"] == []


def folder_of(tmp_path: Path) -> Path:
    """This user's tickets."""
    (found,) = (tmp_path / "leases").glob("paceline-leases-*/*")
    return found


def test_lease_of_a_dead_agent_is_removed(ask: Ask, agents: Any, tmp_path: Path) -> None:
    holder = agents()
    ask("take", **ticket("1", holder, cores=4))
    holder.kill()  # the killed process is still a zombie
    folder = folder_of(tmp_path)
    (folder / "torn.ticket").write_text('{"key": ')
    (folder / "2.ticket.77.new").write_text("half")
    other_boot = ticket("3", agents(), boot_id="another", started="1", granted={"gpus": []})
    (folder / "3.ticket").write_text(json.dumps(other_boot))

    assert ask("look")["tickets"] == []
    assert [path.name for path in folder.iterdir()] == ["use.json"], "which has the time until the kill"


def test_lease_of_a_dead_process_with_a_reused_pid_is_released(ask: Ask, agents: Any, tmp_path: Path) -> None:
    ask("take", **ticket("1", agents()))
    path = folder_of(tmp_path) / "1.ticket"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "12"}))

    assert ask("look")["tickets"] == []


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_lease_files_are_readable_by_all_and_writable_by_the_owner(
    ask: Ask, agents: Any, tmp_path: Path, umask: int
) -> None:
    previous = os.umask(umask)
    try:
        ask("take", **ticket("1", agents()))
    finally:
        os.umask(previous)

    folder = folder_of(tmp_path)
    assert [path.stat().st_mode & 0o7777 for path in (folder.parent, folder)] == [0o755, 0o755]
    (guard,) = (tmp_path / "leases").glob("*.guard")
    assert {path.stat().st_mode & 0o7777 for path in (guard, *folder.iterdir())} == {0o644}


# --- Other users of the machine


def test_unsafe_files_in_the_lease_folder_are_refused_and_the_target_of_a_symlink_is_unchanged(
    ask: Ask, agents: Any, tmp_path: Path
) -> None:
    # Regression: another user put a link in the place of the guard file. Paceline then made the link's target readable
    # for everybody.
    victim, top = tmp_path / "victim", tmp_path / "leases"
    victim.write_text("mine")
    victim.chmod(0o600)
    top.mkdir()
    guard = top / f"paceline-leases-{socket.gethostname()}.guard"
    folder = top / f"paceline-leases-{os.geteuid()}"
    for path, text in ((guard, "is a link"), (folder, "is a link")):
        path.symlink_to(victim)
        assert text in ask("take", **ticket("1", agents()))["error"]
        path.unlink()
    guard.unlink()
    os.mkfifo(guard)
    assert "is not a plain file" in ask("take", **ticket("1", agents()))["error"]
    guard.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert "can be written to by others" in ask("take", **ticket("1", agents()))["error"]
    if os.geteuid() == 0:
        folder.chmod(0o755)
        os.chown(folder, 65534, 65534)
        assert "belongs to user nobody" in ask("take", **ticket("1", agents()))["error"]
        os.rmdir(folder)
        os.chown(top, 65534, 65534)
        assert "belongs to user nobody, who could take leases away" in ask("take", **ticket("1", agents()))["error"]
        os.chown(top, 0, 0)
    top.chmod(0o777)
    assert "Set its sticky bit" in ask("take", **ticket("1", agents()))["error"]
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("mine", 0o600)


def test_queue_ticket_is_attributed_to_its_file_owner_and_needs_a_living_process(
    ask: Ask, agents: Any, tmp_path: Path
) -> None:
    agent = agents()
    ask("take", **ticket("5", agent, cores=1))
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    mine = folder_of(tmp_path)
    path = mine / "5.ticket"
    theirs = mine.parent.parent / "paceline-leases-65534" / mine.name
    theirs.mkdir(parents=True)
    written = json.loads(path.read_text())
    (theirs / "1.ticket").write_text(json.dumps(written | {"key": "1", "cores": 4}))  # its pid belongs to root
    (theirs / "2.ticket").symlink_to(path)
    (theirs / "5.ticket").write_text(path.read_text())  # root's file in a folder of the user `nobody`
    (theirs / "6.ticket").write_text('{"key": "6", "pid": "x", "cores": {}, "granted": 3}')
    for found in (theirs.parent, theirs, theirs / "1.ticket", theirs / "6.ticket"):
        os.chown(found, 65534, 65534)
    assert [(item["key"], item["user"]) for item in ask("look")["tickets"]] == [("5", "root")]

    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    own = subprocess.Popen([*as_nobody, "sleep", "600"])
    # The user `nobody` can't enter the folders above the leases.
    fd = os.open(tmp_path / "leases", os.O_RDONLY)
    os.chmod(tmp_path / "leases", 0o1777)
    try:
        # The program runs as the user `nobody`, and waits in the same queue as root's runs.
        answer = subprocess.run(
            [*as_nobody, sys.executable, "-"],
            input=host_program("take", ticket("1", own, cores=4)),
            capture_output=True,
            check=True,
            cwd="/",
            env={**os.environ, "PACELINE_LEASES": f"/proc/self/fd/{fd}"},
            pass_fds=[fd],
        )
        found = answer_in(answer.stdout)
        assert found is not None, answer
        assert "holders" in found, found
        assert [(item["run_id"], item["user"]) for item in found["holders"]] == [("run 5", "root")]
        later = ask("take", **ticket("9", agent, cores=1))
        assert [(item["run_id"], item["user"]) for item in later["ahead"]] == [("run 1", "nobody")]
    finally:
        os.close(fd)
        own.kill()
        own.wait()


@pytest.mark.promise("another-user-s-ticket-can")
def test_backdated_queue_ticket_of_another_user_is_not_served_first(ask: Ask, agents: Any, tmp_path: Path) -> None:
    # Regression: a ticket of another user with the time "2000-01-01..." blocked all other users. The ticket's run id
    # could also put lines into their status output.
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    own = subprocess.Popen(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "600"])
    try:
        ask("take", **ticket("2026-11-28T09:00:00.000Z_holder", agents(), cores=4))
        waits = ticket("2026-11-28T10:00:00.000Z_mine", agents(), cores=4)
        ask("take", **waits)
        mine = folder_of(tmp_path)
        theirs = mine.parent.parent / "paceline-leases-65534" / mine.name
        theirs.mkdir(parents=True)
        key = "2000-01-01T00:00:00.000Z_evil"
        written = json.loads((mine / f"{waits['key']}.ticket").read_text())
        text = "x\n2026-11-28 Running \x1b[2J"
        path = theirs / f"{key}.ticket"
        path.write_text(
            json.dumps(written | {"key": key, "run_id": text, "pid": own.pid, "started": leases.start_time(own.pid)})
        )
        os.utime(path, (1, 1))
        for found in (theirs.parent, theirs, path):
            os.chown(found, 65534, 65534)

        assert [item["key"][:4] for item in ask("look")["tickets"]] == ["2026", "2026", "2000"]
        found = ask("take", **waits)
        assert [item["user"] for item in found["holders"]] == ["root"]
        assert found["ahead"] == []
        assert ask("look")["tickets"][2]["run_id"] == r"x\n2026-11-28 Running \x1b[2J"
        # A run that comes later waits behind both tickets.
        assert [item["key"][:4] for item in ask("take", **ticket("2026-11-28T11", agents()))["ahead"]] == [
            "2026",
            "2000",
        ]
    finally:
        own.kill()
        own.wait()


@pytest.mark.parametrize(
    ("claimed", "place"),
    [
        ("1970-01-01T00:00:10.0Z_a", 40.0),
        ("1970-01-01T00:01:30.5Z_a", 90.0),
        ("1970-01-01T00:09:00Z_a", 100.0),
        ("7", 100.0),
    ],
)
def test_queue_ticket_can_claim_at_most_a_minute_of_waiting_time(claimed: str, place: float) -> None:
    assert leases.since(claimed, 100.0) == place


def test_repeated_lease_request_does_not_rewrite_the_queue_ticket_of_a_waiting_run(
    ask: Ask, agents: Any, tmp_path: Path
) -> None:
    ask("take", **ticket("1", agents(), cores=4))
    waits = ticket("2", agents(), cores=4)
    ask("take", **waits)
    path = folder_of(tmp_path) / "2.ticket"
    before = path.stat().st_ino, path.stat().st_ctime_ns
    ask("take", **waits)
    assert (path.stat().st_ino, path.stat().st_ctime_ns) == before


def test_hanging_run_is_marked_in_its_ticket(agents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    leases.take(ticket("1", agents(), cores=4))
    since = "2026-11-23 06:12:03 UTC"
    leases.note({"key": "1", "hangs_since": since})
    leases.note({"key": "nowhere", "hangs_since": since})
    waits = leases.take(ticket("2", agents(), cores=4))
    assert [(item["run_id"], item["hangs_since"]) for item in waits["holders"]] == [("run 1", since)]
    leases.note({"key": "1", "hangs_since": None})
    (path,) = (tmp_path / "leases").rglob("1.ticket")
    assert leases.look({})["tickets"][0]["hangs_since"] is None
    # Text in another user's ticket is not shown as a time.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hangs_since": "x" * 22 + "\n"}))
    assert leases.look({})["tickets"][0]["hangs_since"] is None


def test_lease_error_names_the_process_that_holds_the_lock_file(
    agents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Regression: if another process held the lock file, the error was "it does not answer: it is down, or the network
    # in between is".
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path))
    monkeypatch.setattr(leases, "_GUARD_S", 0.1)
    leases.take(ticket("1", agents()))
    (guard,) = tmp_path.glob("*.guard")
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(guard)], stdout=subprocess.PIPE) as blocker:
        assert blocker.stdout is not None
        blocker.stdout.readline()
        try:
            with pytest.raises(TimeoutError) as caught:
                leases.look({})
            # A run that asks for its share waits, as for other runs.
            assert "stays taken" in leases.take(ticket("2", agents()))["why"]
            # A run that has ended or grows does not fail: its lease ends with its process.
            local_leases.SharedQueue(4, ()).release(tmp_path)
            monkeypatch.setattr(local_leases, "is_shared", lambda: True)
            job = make_job(node_count=2, distributed_backend="gloo")
            assert ThisMachine().nodes_to_be_had(job, tmp_path, types.SimpleNamespace(nodes=[None])) == 1
        finally:
            blocker.kill()
    assert f"process {blocker.pid} ({sys.executable} -c import fcntl" in str(caught.value)
    assert leases.look({})["tickets"][0]["key"] == "1"


def test_lease_program_reports_cores_gpus_and_python_version(ask: Ask) -> None:
    found = ask("look", {"PACELINE_GPUS": "2,5"}, with_gpus=True)

    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["gpus"] == ["2", "5"]
    assert tuple(found["python"][1:3]) == sys.version_info[:2]
    assert "gpus" not in ask("look")


def test_lease_request_reports_a_file_in_place_of_the_lease_folder(ask: Ask, agents: Any, tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("in the way")
    assert "is not a folder" in ask("take", **ticket("1", agents()))["error"]


def test_lease_program_is_valid_python_3_6() -> None:
    import ast

    ast.parse(host_program("look", {}), feature_version=(3, 6))


@pytest.mark.skipif(old_python() is None, reason="needs a Python 3.6, to stand for that of a host")
def test_lease_program_runs_on_python_3_6(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho 0\necho 1\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PACELINE_LEASES": str(tmp_path / "leases")}
    program = host_program("look", {"with_gpus": True})
    words = [str(old_python()), "-W", "error", "-"]
    done = subprocess.run(words, input=program, capture_output=True, check=False, env=environment)
    found = answer_in(done.stdout)
    assert found is not None, done.stderr
    assert (found["gpus"], found["python"][1:3]) == (["0", "1"], [3, 6])


@pytest.mark.promise("use-outside-paceline-not-handed-out")
def test_gpu_in_use_outside_paceline_is_not_granted_and_the_answer_names_its_user(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    used = {"0": "used by bob's python (pid 4711), 40.0 GB"}
    monkeypatch.setattr(leases, "used_gpus", lambda gpus, own: used)
    asked = {"pid": os.getpid(), "cores": 0, "all_cores": 4, "all_gpus": ["0", "1"], "port_count": 0}

    first = leases.take({"key": "1", "run_id": "a", "gpu_count": 1, **asked})
    second = leases.take({"key": "2", "run_id": "b", "gpu_count": 1, **asked})

    assert first["granted"]["gpus"] == ["1"]
    assert second["why"] == "GPU 0: used by bob's python (pid 4711), 40.0 GB"
    found = leases.look({"gpus": ["0", "1"]})
    assert found["outside"][0] == "GPU 0: used by bob's python (pid 4711), 40.0 GB"
    runs, waits = host_status("gpu1", found).jobs
    assert (runs.run_id, runs.reason) == ("a", "")
    assert waits.reason == "GPU 0: used by bob's python (pid 4711), 40.0 GB; likely to start in 60 min"
    assert host_status("gpu1", found).used_gpus == 2


def test_run_that_leaves_for_an_urgent_run_beside_a_gpu_in_use_outside_paceline_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    used = {}
    monkeypatch.setattr(leases, "used_gpus", lambda gpus, own: used)
    asked = {"pid": os.getpid(), "cores": 0, "all_cores": 4, "all_gpus": ["0", "1"], "port_count": 0}
    leases.take({"key": "1", "run_id": "a", "gpu_count": 1, **asked})
    used.update({"0": "used by itself", "1": "used by bob's python"})
    leases.take({"key": "2", "run_id": "b", "gpu_count": 1, "priority": "urgent", **asked})

    runs, waits = leases.look({"gpus": ["0", "1"]})["tickets"]

    assert (runs["run_id"], runs["is_asked_to_leave"], runs["why"]) == ("a", True, None)
    assert (waits["run_id"], waits["why"]) == ("b", "GPU 1: used by bob's python")
    assert waits["starts_in_s"] == pytest.approx(60, abs=5)


def test_urgent_run_is_expected_to_start_when_the_runs_that_leave_for_it_have_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    asked = {"pid": os.getpid(), "cores": 0, "all_cores": 4, "all_gpus": ["0"], "port_count": 0, "gpu_count": 1}
    leases.take({"key": "1", "run_id": "a", **asked})
    leases.take({"key": "2", "run_id": "b", "priority": "urgent", **asked})

    jobs = {job.run_id: job.reason for job in host_status("gpu1", leases.look({"gpus": ["0"]})).jobs}

    assert jobs["a"] == "leaves for an urgent run"
    assert jobs["b"] == "free cores or GPUs, first in the queue; likely to start in a minute"


def test_run_over_its_quota_has_no_expected_start_and_delays_no_other_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path))
    (tmp_path / "paceline-share").mkdir()
    (tmp_path / "paceline-share/shares.json").write_text('{"limits": {"*": {"gpus": 2}}}')
    asked = {"pid": os.getpid(), "cores": 0, "all_cores": 4, "all_gpus": ["0", "1"], "port_count": 0}
    leases.take({"key": "1", "run_id": "a", "gpu_count": 2, **asked})
    leases.take({"key": "2", "run_id": "b", "gpu_count": 1, **asked})

    _, waits = leases.look({"gpus": ["0", "1"]})["tickets"]

    assert waits["why"].startswith("over quota: ")
    assert waits["starts_in_s"] is None


def test_run_does_not_leave_for_an_urgent_run_that_needs_a_gpu_in_use_outside_paceline(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    monkeypatch.setattr(leases, "used_gpus", lambda gpus, own: {"0": "used by bob's python"})
    asked = {"pid": os.getpid(), "cores": 0, "all_cores": 4, "all_gpus": ["0", "1"], "port_count": 0}
    leases.take({"key": "1", "run_id": "a", "gpu_count": 1, **asked})
    leave = {"key": "1", "all_cores": 4, "all_gpus": ["0", "1"]}
    leases.take({"key": "2", "run_id": "b", "gpu_count": 2, "priority": "urgent", **asked})
    assert leases.leave(dict(leave)) == {"leave": ""}
    leases.give_back({"key": "2"})
    leases.take({"key": "3", "run_id": "b", "gpu_count": 1, "priority": "urgent", **asked})
    assert "urgent run b" in leases.leave(dict(leave))["leave"]


def test_gpu_is_leased_to_a_new_agent_of_a_run_only_after_the_end_of_its_old_agent(agents, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    old, new = agents(), agents()
    asked = {"key": "1", "run_id": "a", "cores": 0, "gpu_count": 1, "all_cores": 4, "all_gpus": ["0"], "port_count": 0}
    assert leases.take({**asked, "pid": old.pid})["granted"]["gpus"] == ["0"]
    for at_once in (True, False, False):
        answer = leases.take({**asked, "pid": new.pid, "at_once": at_once})
        assert [one["pid"] for one in answer["holders"]] == [old.pid]
    old.kill()
    old.wait()
    assert leases.take({**asked, "pid": new.pid})["granted"]["gpus"] == ["0"]


@pytest.mark.promise("hostile-user-cannot-jump-queue")
@pytest.mark.parametrize("granted", [{"gpus": [], "ports": [[1]]}, {"gpus": [], "ports": 1}, {"gpus": [1]}, []])
def test_foreign_folders_and_tickets_with_wrong_values_are_ignored(agents, tmp_path, monkeypatch, granted):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path))
    leases.take(ticket("1", agents()))
    for name in ("\u00b2", "\u0663", "x", f"0{os.geteuid()}"):
        (tmp_path / f"paceline-leases-{name}" / os.uname().nodename).mkdir(parents=True)
    (path,) = tmp_path.rglob("1.ticket")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"granted": granted}))
    assert leases.look({})["tickets"] == []
    assert leases.take(ticket("2", agents(), port_count=0), lambda count, taken: [])["granted"] is not None


@pytest.mark.promise("use-outside-paceline-not-handed-out")
def test_cores_beside_an_outside_process_go_to_the_run_whose_turn_it_is(tmp_path, monkeypatch):
    """A preempted run took the core of the urgent run again, because it had asked before the urgent run."""
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path))
    monkeypatch.setattr(books, "used_cores", lambda own: {7: (0.9, "bob's ffmpeg (pid 7)")})
    (tmp_path / "paceline-share").mkdir()
    (tmp_path / "paceline-share/shares.json").write_text("{}")
    asked = {"pid": os.getpid(), "cores": 1, "gpu_count": 0, "all_cores": 2, "all_gpus": [], "port_count": 0}
    leases.take({"key": "1", "run_id": "a", **asked})
    urgent = {"key": "2", "run_id": "b", "priority": "urgent", **asked}
    normal = {"key": "3", "run_id": "c", **asked}
    assert leases.take(dict(urgent))["why"] == "cores: used by bob's ffmpeg (pid 7), 0.9 cores"
    leases.take(dict(normal))
    leases.give_back({"key": "1"})

    assert "granted" not in leases.take(dict(normal))
    assert "granted" in leases.take(dict(urgent))


def test_queue_shows_the_priority_that_the_limit_of_the_user_allows(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path))
    (tmp_path / "paceline-share").mkdir()
    (tmp_path / "paceline-share/shares.json").write_text('{"limits": {"*": {"priority": "high"}}}')
    asked = {"pid": os.getpid(), "cores": 1, "gpu_count": 0, "all_cores": 2, "all_gpus": [], "port_count": 0}
    leases.take({"key": "1", "run_id": "a", "priority": "urgent", **asked})
    assert [one["priority"] for one in leases.look({})["tickets"]] == ["high"]


def test_waiting_run_reads_no_queue_tickets_until_the_lease_folder_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    asked = {"pid": os.getpid(), "gpu_count": 0, "all_cores": 4, "all_gpus": [], "port_count": 0}
    leases.take({"key": "1", "run_id": "a", "cores": 4, **asked})
    waits = {"key": "2", "run_id": "b", "cores": 1, **asked}
    answer = leases.take(dict(waits))
    leases.take(dict(waits))  # the first call has written a ticket, so this call reads the folder again
    monkeypatch.setattr(leases, "locked", pytest.fail)
    assert leases.take(dict(waits)) == answer
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    leases.give_back({"key": "1"})
    deadline = time.monotonic() + 90
    while "granted" not in leases.take(dict(waits)):
        assert time.monotonic() < deadline


def test_fifty_waiting_runs_rarely_read_the_queue_and_check_few_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    asked = {"pid": os.getpid(), "gpu_count": 0, "all_cores": 8, "all_gpus": [], "port_count": 0, "cores": 1}
    runs = [{"key": f"{number:02d}", "run_id": f"run {number}", **asked} for number in range(58)]
    clock, counts = [0.0], collections.Counter[str]()
    monkeypatch.setattr(books.time, "monotonic", lambda: clock[0])
    for run in runs:
        leases.take(dict(run))
    queue = leases.host_queue()
    for name in ("stamp", "tickets", "_is_alive"):
        method = getattr(queue, name)
        counted = lambda *args, name=name, method=method: counts.update([name]) or method(*args)  # noqa: E731
        monkeypatch.setattr(queue, name, counted)
    for run in runs[8:]:  # the later runs' tickets have changed the folder, so each run reads it once more
        leases.take(dict(run))
    counts.clear()
    seconds = 60
    while clock[0] < seconds:
        clock[0] += 0.2
        for run in runs[8:]:
            assert "granted" not in leases.take(dict(run))
    assert counts["tickets"] / seconds < 0.12
    assert counts["_is_alive"] / seconds < 30
    assert counts["stamp"] / seconds < 50


def test_run_of_a_user_waits_for_the_next_run_if_the_first_does_not_start(tmp_path, monkeypatch):
    """A third run overtook the second one when the first one was suspended."""
    clock = [1000.0]
    monkeypatch.setattr(books.time, "monotonic", lambda: clock[0])
    queue = books.Queue(str(tmp_path), lambda: [(None, str(tmp_path))], contextlib.nullcontext, lambda ticket: True)
    keys = [f"2026-01-01T00:00:0{number}.000Z_run" for number in range(3)]
    asked = {"run_id": "run", "cores": 0, "gpu_count": 1, "port_count": 0, "granted": None}
    for key in keys:
        queue.write({"key": key, **asked})
    granted_at = 0.0
    while not granted_at:
        *others, mine = sorted(queue.tickets(), key=lambda ticket: ticket["key"])
        if "granted" in queue.grant(mine, others, 4, ["0"]):
            granted_at = clock[0]
        clock[0] += 1.0
    assert granted_at - 1000 == pytest.approx(2 * books._OFFER_S, abs=3)


@pytest.mark.parametrize(("pause_s", "overtakes"), [(5.0, True), (3600.0, False)])
def test_waiting_run_overtakes_an_idle_one_only_if_it_has_watched_the_queue(tmp_path, monkeypatch, pause_s, overtakes):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    asked = {"pid": os.getpid(), "gpu_count": 1, "all_cores": 8, "all_gpus": ["0"], "port_count": 0, "cores": 1}
    first, waits = ({"key": key, "run_id": f"run {key}", **asked} for key in ("1", "2"))
    clock = [1000.0]
    monkeypatch.setattr(books.time, "monotonic", lambda: clock[0])
    leases.take({**first, "key": "0"})
    leases.take(dict(first))
    leases.take(dict(waits))
    # The GPU is now offered to the first run, which does not take it. With the long pause, it may have run meanwhile.
    leases.give_back({"key": "0"})
    for _ in range(4):  # the end of an offer changes no file
        clock[0] += pause_s
        granted = "granted" in leases.take(dict(waits))
    assert granted == overtakes
