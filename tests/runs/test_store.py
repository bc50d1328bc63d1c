from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import FileNameError, RunNotFoundError, RunStateError, WorkspaceError
from paceline.job.job import Job
from paceline.runs import read, states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder, has_own_record
from paceline.runs.record import Attempt
from paceline.system import locks, processes
from paceline.system.files import json_lines, read_json, write_json
from tests.helpers import RUN_ID, fill_disk, make_job, make_record, make_run, start_python, wait_until, write_tree

LIVE = [status for status in states.ALL if status not in states.TERMINAL]


@pytest.fixture
def runs_dir(tmp_path):
    return tmp_path / "ws/runs"


def deserted(runs_dir, status=states.RUNNING, run_id=RUN_ID, **values):
    """Make a run without a supervisor."""
    folder, fd = make_run(runs_dir, run_id, status, **values)
    os.close(fd)
    return folder


# --- Creating and changing runs


def test_new_run_has_folders_a_record_and_a_held_lock(runs_dir):
    folder, fd = make_run(runs_dir)
    assert read.record(folder).status == states.NOT_STARTED
    assert locks.is_held(folder.lock)
    assert all(part.is_dir() for part in (folder.logs, folder.outputs, folder.metrics, folder.checkpoints))
    assert [event["status"] for event in json_lines(folder.events)] == [states.NOT_STARTED]
    assert os.listdir(runs_dir) == [RUN_ID]
    os.close(fd)


@pytest.mark.parametrize("run_id", ["../evil", "a/b", ""])
def test_run_id_outside_the_workspace_is_refused(runs_dir, run_id):
    with pytest.raises(FileNameError):
        store.create(runs_dir, make_record(run_id))


def test_run_creation_in_an_unwritable_workspace_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="PACELINE_WORKSPACE"):
        store.create(tmp_path / "file/runs", make_record())


def test_failed_run_creation_leaves_no_files(runs_dir, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_json", full)
    with pytest.raises(WorkspaceError, match="No space left on device"):
        store.create(runs_dir, make_record())
    assert os.listdir(runs_dir) == []


def test_create_fails_and_keeps_the_files_of_a_program_that_is_creating_the_same_run_id(runs_dir):
    # Two runs can have the same id only if users choose the ids.
    half_made = runs_dir / f".new-{RUN_ID}"
    half_made.mkdir(parents=True)
    (half_made / "lock").write_text("")
    with pytest.raises(WorkspaceError):
        store.create(runs_dir, make_record())
    assert (half_made / "lock").exists()


def test_creating_a_run_whose_record_is_no_json_leaves_no_files(runs_dir):
    with pytest.raises(TypeError):
        store.create(runs_dir, make_record(git={"commit": object()}))
    assert os.listdir(runs_dir) == []


def test_each_state_change_is_recorded_with_its_time(runs_dir):
    folder, fd = make_run(runs_dir)
    record = store.stored(folder)
    for status in (states.QUEUED, states.RUNNING):
        record = store.change(folder, record, status)
    report = FailureReport(cause="exception", message="bad batch")
    store.change(folder, record, states.FAILED, failure=report, exit_code=1)
    os.close(fd)
    events = list(json_lines(folder.events))
    assert [event["status"] for event in events] == ["NotStarted", "Queued", "Running", "Failed"]
    assert events[-1]["message"] == "bad batch"
    assert [event["time_utc"] for event in events] == sorted(event["time_utc"] for event in events)
    assert (read.record(folder).failure, read.record(folder).exit_code) == (report, 1)


@pytest.mark.promise("end-final-written-full-disk")
@pytest.mark.parametrize("status", sorted(states.TERMINAL))
def test_terminal_state_can_not_change(runs_dir, status):
    folder, fd = make_run(runs_dir, status=status)
    with pytest.raises(RunStateError, match=f"is {status}; it can't become Running"):
        store.change(folder, store.stored(folder), states.RUNNING)
    os.close(fd)
    assert read.record(folder).status == status


# --- Full disks


@pytest.mark.promise("end-final-written-full-disk")
def test_final_run_record_is_written_if_other_files_take_all_space_before_it(small_disk):
    # Regression: the reserved space was freed for the state Finalizing, and files that came from the nodes then took it.
    folder, fd = make_run(small_disk / "runs", status=states.RUNNING)
    fill_disk(small_disk)
    record = store.change(folder, store.stored(folder), states.FINALIZING)
    fill_disk(small_disk)
    store.change(folder, record, states.COMPLETED, exit_code=0)
    os.close(fd)
    assert store.stored(folder).status == states.COMPLETED
    assert not folder.ballast.exists()


@pytest.mark.promise("end-final-written-full-disk")
def test_final_run_record_is_written_even_on_a_full_disk(small_disk):
    folder, fd = make_run(small_disk / "runs", status=states.RUNNING)
    fill_disk(small_disk)
    with pytest.raises(OSError, match="No space left"):
        (folder.outputs / "model").write_bytes(b"0" * 10_000)
    report = FailureReport(cause="disk", message="the disk is full", last_lines=("x" * 200,) * 20)
    store.change(folder, store.stored(folder), states.FAILED, failure=report, exit_code=1)
    os.close(fd)
    assert (read.record(folder).status, read.record(folder).failure) == (states.FAILED, report)


def test_run_continues_if_a_full_disk_prevents_storing_an_intermediate_state(small_disk):
    folder, fd = make_run(small_disk / "runs", status=states.STARTING)
    fill_disk(small_disk)
    record = store.change(folder, store.stored(folder), states.RUNNING)
    assert (record.status, read.record(folder).status) == (states.RUNNING, states.STARTING)
    store.change(folder, record, states.COMPLETED)
    assert read.record(folder).status == states.COMPLETED
    os.close(fd)


def test_cancel_can_be_requested_on_a_full_disk(small_disk):
    folder, fd = make_run(small_disk / "runs", status=states.RUNNING)
    fill_disk(small_disk)
    read.request_cancel(folder, by="me")
    assert read.record(folder).status == states.CANCEL_REQUESTED
    os.close(fd)


def test_creating_a_run_on_a_full_disk_fails_and_leaves_no_files(small_disk):
    fill_disk(small_disk)
    with pytest.raises(WorkspaceError, match="No space left"):
        store.create(small_disk / "runs", make_record())
    assert not (small_disk / "runs").exists() or os.listdir(small_disk / "runs") == []


def test_ended_run_releases_its_reserved_disk_space(runs_dir):
    folder, fd = make_run(runs_dir)
    assert folder.ballast.stat().st_size > 0
    store.change(folder, store.stored(folder), states.COMPLETED)
    os.close(fd)
    assert not folder.ballast.exists()


# --- Finding and listing runs


def test_find_accepts_a_run_id_or_its_first_characters(runs_dir):
    folder, fd = make_run(runs_dir, "digits_1700000000_aaaa0000")
    os.close(fd)
    for run_id in ("digits_1700000000_aaaa0000", "digits_17", "d"):
        assert store.find(runs_dir, run_id) == folder


def test_ambiguous_id_prefix_is_refused_with_the_candidates(runs_dir):
    for run_id in ("digits_1700000000_aaaa0000", "digits_1700000000_aaaa0001"):
        os.close(make_run(runs_dir, run_id)[1])
    with pytest.raises(RunNotFoundError, match=r"2 runs begin with 'digits_17': .*aaaa0001.*Give more of the id"):
        store.find(runs_dir, "digits_17")


def test_id_prefix_of_a_sweep_finds_the_sweep_and_not_its_trials(runs_dir):
    sweep = "tuned_1700000000_00000001"
    for run_id in (f"{sweep}_10", sweep, f"{sweep}_0", "other_1700000000_00000001"):
        os.close(make_run(runs_dir, run_id)[1])
    assert store.find(runs_dir, "tuned_17").run_id == sweep
    assert store.find(runs_dir, f"{sweep}_1").run_id == f"{sweep}_10"
    os.close(make_run(runs_dir, "tuned_1700000005_00000001")[1])
    with pytest.raises(RunNotFoundError, match="4 runs begin with"):
        store.find(runs_dir, "tuned_17")


def test_exact_id_wins_over_longer_ids(runs_dir):
    for run_id in ("a_1", "a_1x"):
        os.close(make_run(runs_dir, run_id)[1])
    assert store.find(runs_dir, "a_1").run_id == "a_1"


@pytest.mark.parametrize("run_id", ["nowhere", "digits_2"])
def test_finding_an_unknown_run_raises_an_error_that_suggests_paceline_list(runs_dir, run_id):
    os.close(make_run(runs_dir)[1])
    with pytest.raises(RunNotFoundError, match="`paceline list`"):
        store.find(runs_dir, run_id)


@pytest.mark.parametrize("run_id", ["../x", "..", "/etc", ".hidden", ""])
def test_find_refuses_an_empty_or_hidden_run_id_and_a_path(runs_dir, run_id):
    with pytest.raises(FileNameError):
        store.find(runs_dir, run_id)


def test_runs_are_listed_newest_first(runs_dir):
    for run_id in ("b_1700000001_00000000", "a_1700000003_00000000", "c_1700000002_00000000", "by-hand"):
        os.close(make_run(runs_dir, run_id)[1])
    expected = ["a_1700000003_00000000", "c_1700000002_00000000", "b_1700000001_00000000", "by-hand"]
    assert store.ids(runs_dir) == expected
    assert [record.run_id for record in read.all_records(runs_dir)] == expected


def test_workspace_without_runs_lists_no_runs(runs_dir):
    assert store.ids(runs_dir) == []
    assert list(read.all_records(runs_dir)) == []


@pytest.mark.parametrize("name", ["half", "a_²_b", "x_y_z"])
def test_folder_without_a_run_record_is_not_listed(runs_dir, name):
    os.close(make_run(runs_dir)[1])
    (runs_dir / name).mkdir()
    (runs_dir / ".new-x").mkdir()
    assert [record.run_id for record in read.all_records(runs_dir)] == [RUN_ID]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"version": 1}', "\0" * 100], ids=repr)
@pytest.mark.parametrize("name", ["job", "state"])
def test_damaged_record_is_skipped_in_listings(runs_dir, name, text):
    folder, other = deserted(runs_dir), deserted(runs_dir, run_id="digits_1700000000_00000002")
    getattr(folder, name).write_text(text)
    with pytest.raises(RunNotFoundError, match="no readable record"):
        read.record(folder)
    assert [record.run_id for record in read.all_records(runs_dir)] == [other.run_id]


def test_run_record_of_a_newer_version_does_not_hide_other_runs(runs_dir):
    # The members of a team may share a workspace, and do not all update on the same day.
    folder, other = deserted(runs_dir), deserted(runs_dir, run_id="digits_1700000000_00000002")
    for path in (folder.job, folder.state):
        data = read_json(path)
        data["version"] = 99
        if "job" in data:
            data["job"] |= {"version": 99, "flavour": "mint"}
        write_json(path, data)
    assert other.run_id in [record.run_id for record in read.all_records(runs_dir)]


def test_state_change_does_not_rewrite_the_job_file_and_a_process_validates_the_job_once(runs_dir, monkeypatch):
    folder, fd = make_run(runs_dir, job=make_job())
    before = os.stat(folder.job)
    monkeypatch.setattr(Job, "__post_init__", None)
    record = store.change(folder, store.stored(folder), states.RUNNING)
    assert store.stored(folder) == record
    store._known.clear()
    monkeypatch.undo()
    assert store.stored(folder) == record
    monkeypatch.setattr(Job, "__post_init__", None)
    assert store.stored(folder) == record
    assert (before.st_ino, before.st_mtime_ns) == (os.stat(folder.job).st_ino, os.stat(folder.job).st_mtime_ns)
    os.close(fd)


def test_replaced_job_file_is_read_again(runs_dir):
    folder, fd = make_run(runs_dir, job=make_job(arguments=("a",)))
    assert store.stored(folder).job.arguments == ("a",)
    data = read_json(folder.job)
    data["job"]["arguments"] = ["b"]
    write_json(folder.job, data)
    assert store.stored(folder).job.arguments == ("b",)
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another user")
@pytest.mark.parametrize("name", ["job", "state"])
def test_run_is_trusted_only_if_both_of_its_record_files_belong_to_the_user(runs_dir, monkeypatch, name):
    folder, fd = make_run(runs_dir)
    assert has_own_record(folder)
    os.chown(getattr(folder, name), 12345, -1)
    assert not has_own_record(folder)
    os.close(fd)


def test_raw_json_of_a_run_equals_its_record(runs_dir):
    folder, fd = make_run(runs_dir, status=states.RUNNING)
    assert read.raw(folder) == read.record(folder).to_json()
    os.close(fd)
    assert read.raw(folder)["status"] == states.FAILED


# --- Runs without a supervisor


@pytest.mark.parametrize("status", LIVE)
def test_run_whose_supervisor_has_died_is_marked_as_failed_from_every_unfinished_state(runs_dir, status):
    folder = deserted(runs_dir, status, waiting_for="1 run")
    record = read.record(folder)
    assert (record.status, record.exit_code, record.waiting_for) == (states.FAILED, 1, None)
    assert record.ended_utc is not None
    assert read_json(folder.state)["status"] == states.FAILED
    assert [event["status"] for event in json_lines(folder.events)][-1] == states.FAILED
    # The next reader gets the same record.
    assert read.record(folder) == record


@pytest.mark.parametrize("status", LIVE)
def test_run_with_a_living_supervisor_keeps_its_state(runs_dir, status):
    folder, fd = make_run(runs_dir, status=status)
    assert read.record(folder).status == status
    os.close(fd)


@pytest.mark.parametrize(
    ("values", "cause", "said"),
    [
        ({"owner": {"pid": 5, "host": socket.gethostname(), "boot_id": processes.boot_id()}}, "supervisor", "pid 5"),
        ({"owner": {"pid": 5, "host": socket.gethostname(), "boot_id": "of-yesterday"}}, "reboot", "restarted"),
        ({"owner": {"pid": 5, "host": "another-machine", "boot_id": "of-its-own"}}, "supervisor", "pid 5"),
        ({"owner": {"pid": 5, "host": socket.gethostname(), "boot_id": ""}}, "supervisor", "pid 5"),
        ({"owner": {}}, "supervisor", "supervisor"),
        ({"kind": "interactive"}, "not_completed", "without complete()"),
    ],
)
def test_failure_of_an_abandoned_run_explains_why_its_supervisor_is_gone(runs_dir, values, cause, said):
    record = read.record(deserted(runs_dir, **values))
    assert record.failure.cause == cause
    assert said in record.failure.message
    assert record.failure.see == (None if "kind" in values else f"paceline logs {RUN_ID}")


@pytest.mark.parametrize("is_marked", [True, False])
def test_reader_reports_an_abandoned_run_as_failed_while_another_process_ends_it(runs_dir, monkeypatch, is_marked):
    attempt = Attempt(number=1, started_utc="2026-01-01T00:00:00.000Z", nodes=("n",))
    folder, fd = make_run(runs_dir, status=states.RUNNING, attempts=(attempt,))
    if is_marked:
        store.mark_closing(folder)
    else:  # as for a reader that saw the free lock a moment ago
        monkeypatch.setattr(locks, "is_held", lambda path, here: False)
    record = read.record(folder)
    os.close(fd)
    assert (record.status, record.exit_code, record.attempts[0].cause) == (states.FAILED, 1, "supervisor")
    assert record.ended_utc is not None
    assert record.attempts[0].ended_utc == record.ended_utc
    assert read_json(folder.state)["status"] == states.RUNNING


def test_all_readers_of_a_run_that_is_being_closed_report_the_end_that_is_recorded_later(runs_dir):
    # Regression: each reader reported its own time as the end, and the record had a later time still.
    attempt = Attempt(number=1, started_utc="2026-01-01T00:00:00.000Z", nodes=("n",))
    folder, fd = make_run(runs_dir, status=states.RUNNING, attempts=(attempt,), scratch_dir="/tmp/none")
    store.mark_closing(folder)
    os.utime(folder.closing, (1_900_000_000,) * 2)
    first = read.record(folder)
    store.mark_closing(folder)  # a second process closes the run after the first was killed
    seen = [first, read.record(folder)]
    os.close(fd)
    seen.append(read.record(folder))
    assert seen == [first] * 3
    assert (first.status, first.ended_utc) == (states.FAILED, "2030-03-17T17:46:40.000Z")
    assert not folder.closing.exists()


def test_reader_that_finds_the_lock_of_an_abandoned_run_taken_reports_the_time_that_is_recorded(runs_dir, monkeypatch):
    folder, fd = make_run(runs_dir, status=states.RUNNING)
    monkeypatch.setattr(locks, "is_held", lambda path, here: False)
    early = read.record(folder)
    os.close(fd)
    assert read.record(folder) == early


def test_mark_of_a_reader_that_came_too_late_is_removed(runs_dir, monkeypatch):
    folder = deserted(runs_dir)
    take = locks.take

    def take_after_another(path):
        monkeypatch.setattr(locks, "take", take)
        read.record(folder)  # another reader closes the run
        store.mark_closing(folder)
        return take(path)

    monkeypatch.setattr(locks, "take", take_after_another)
    assert read.record(folder).status == states.FAILED
    assert not folder.closing.exists()


def test_run_whose_submission_was_killed_fails_with_cause_not_started(runs_dir):
    assert read.record(deserted(runs_dir, states.NOT_STARTED)).failure.cause == "not_started"


def test_run_owner_has_pid_host_and_boot_id():
    assert store.owner() == {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": processes.boot_id()}


@pytest.mark.promise("run-whose-supervisor-gone-never")
def test_run_of_a_killed_program_is_not_shown_as_running(runs_dir):
    code = """
import sys, time
from pathlib import Path
from paceline.runs import states
from tests.helpers import make_run
folder, fd = make_run(Path(sys.argv[1]), status=states.RUNNING)
print("made", flush=True)
time.sleep(60)
"""
    root = str(Path(__file__).parents[2])
    with start_python(code, runs_dir, environment={"PYTHONPATH": root}) as process:
        process.stdout.readline()
        folder = RunFolder(runs_dir / RUN_ID)
        assert read.record(folder).status == states.RUNNING
        process.kill()
        process.wait()
    assert read.record(folder).status == states.FAILED


def test_concurrent_readers_fail_an_abandoned_run_once(runs_dir):
    folder = deserted(runs_dir)
    code = """
import sys
from pathlib import Path
from paceline.runs import read
from paceline.runs.folder import RunFolder
print("ready", flush=True)
sys.stdin.readline()
print(read.record(RunFolder(Path(sys.argv[1]))).status)
"""
    started = [start_python(code, folder.path, stdin=subprocess.PIPE) for _ in range(4)]
    for process in started:
        process.stdout.readline()
    answers = [process.communicate("go\n")[0] for process in started]
    assert set(answers) == {"Failed\n"}
    assert [event["status"] for event in json_lines(folder.events)].count("Failed") == 1


def test_processes_of_an_abandoned_run_are_killed(runs_dir):
    folder, fd = make_run(runs_dir, status=states.RUNNING)
    worker = subprocess.Popen(["sleep", "60"], env={**os.environ, "PACELINE_RUN_DIR": str(folder.path)})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "PACELINE_RUN_DIR": f"{folder.path}0"})
    try:
        assert read.record(folder).status == states.RUNNING
        assert worker.poll() is None
        os.close(fd)
        wait_until(lambda: processes.with_variable("PACELINE_RUN_DIR", str(folder.path)), "the worker")
        assert read.record(folder).status == states.FAILED
        assert worker.wait(timeout=60) < 0
        assert other.poll() is None
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_scratch_folder_of_an_abandoned_run_is_removed(runs_dir, tmp_path):
    scratch = tmp_path / "tmp" / RunFolder(runs_dir / RUN_ID).scratch.name
    (scratch / "socket").mkdir(parents=True)
    scratch.parent.chmod(0o1777)
    read.record(deserted(runs_dir, scratch_dir=str(scratch)))
    assert not scratch.exists()


def test_run_that_completes_during_the_liveness_check_stays_completed(runs_dir, monkeypatch):
    folder, fd = make_run(runs_dir, status=states.RUNNING)

    def ends_meanwhile(path, here):
        store.change(folder, store.stored(folder), states.COMPLETED)
        os.close(fd)
        return False

    monkeypatch.setattr(locks, "is_held", ends_meanwhile)
    assert read.record(folder).status == states.COMPLETED


def test_reader_without_write_access_reports_an_abandoned_run_as_failed(runs_dir, monkeypatch):
    folder = deserted(runs_dir)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    record = read.record(folder)
    assert (record.status, record.failure.cause) == (states.FAILED, "supervisor")
    assert read_json(folder.state)["status"] == states.RUNNING


# --- Requests to cancel a run


def test_running_run_with_a_cancel_request_has_the_state_cancel_requested(runs_dir):
    folder, fd = make_run(runs_dir, status=states.RUNNING)
    for _ in range(2):
        read.request_cancel(folder, by="me", reason="typo")
    assert read.record(folder).status == states.CANCEL_REQUESTED
    assert store.stored(folder).status == states.RUNNING
    assert read_json(folder.cancel_request)["by"] == "me"
    os.close(fd)


@pytest.mark.parametrize("status", [states.FINALIZING, *sorted(states.TERMINAL)])
def test_finalizing_or_ended_run_with_a_cancel_request_keeps_its_state(runs_dir, status):
    folder, fd = make_run(runs_dir, status=status)
    read.request_cancel(folder, by="me")
    assert read.record(folder).status == status
    os.close(fd)


def test_abandoned_run_with_a_cancel_request_is_failed(runs_dir):
    folder = deserted(runs_dir)
    read.request_cancel(folder, by="me")
    assert read.record(folder).status == states.FAILED


def test_process_of_a_run_never_marks_its_own_run_as_abandoned(runs_dir, monkeypatch):
    folder = deserted(runs_dir)
    monkeypatch.setenv("PACELINE_RUN_ID", RUN_ID)
    assert read.record(folder).status == states.RUNNING


def test_copy_of_a_run_folder_on_a_node_is_not_marked_as_abandoned(runs_dir):
    folder = deserted(runs_dir)
    folder.lock.unlink()
    assert read.record(folder).status == states.RUNNING


# --- Files of other users


def test_lock_file_is_not_writable_by_others(runs_dir):
    # Regression: every user could read the lock file, and reading is enough to hold the lock.
    folder, fd = make_run(runs_dir)
    shared = folder.path.stat().st_mode & 0o020
    assert folder.lock.stat().st_mode & 0o777 == (0o660 if shared else 0o600)
    os.close(fd)


READ = """
import os, sys
from pathlib import Path
from paceline.runs import read
from paceline.runs.folder import RunFolder
os.setgroups([int(sys.argv[3])]); os.setgid(65534); os.setuid(65534)
record = read.record(RunFolder(Path(sys.argv[1]) / sys.argv[2]))
print(record.status, record.failure.cause if record.failure else None)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("group", [65534, 4711], ids=["stranger", "of the group"])
@pytest.mark.parametrize("is_alive", [True, False])
def test_read_only_user_sees_run_states(runs_dir, is_alive, group):
    # A group shares the folder: it has setgid, and the umask lets the group write.
    previous = os.umask(0o002)
    try:
        runs_dir.parent.mkdir()
        os.chown(runs_dir.parent, 0, 4711)
        runs_dir.parent.chmod(0o2775)
        folder, fd = make_run(runs_dir, status=states.RUNNING, owner=store.owner())
    finally:
        os.umask(previous)
    assert folder.lock.stat().st_mode & 0o777 == 0o660
    assert folder.lock.stat().st_gid == 4711
    if not is_alive:
        os.close(fd)
    top = os.open(runs_dir, os.O_RDONLY)  # other users can't enter the folders above
    done = subprocess.run(
        [sys.executable, "-c", READ, f"/proc/self/fd/{top}", folder.run_id, str(group)],
        pass_fds=[top],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(top)
    assert done.stdout.split()[:1] == (["Running"] if is_alive else ["Failed"]), done.stderr
    if is_alive:
        os.close(fd)


def test_run_gets_a_copy_of_the_given_checkpoints(runs_dir, tmp_path):
    write_tree(tmp_path / "others", {"step_3/model.pt": "weights"})
    os.close(store.create(runs_dir, make_record(), checkpoints=tmp_path / "others"))
    assert (RunFolder(runs_dir / RUN_ID).checkpoints / "step_3/model.pt").read_text() == "weights"


def test_creating_a_run_with_missing_checkpoints_raises_an_error_and_leaves_no_files(runs_dir, tmp_path):
    with pytest.raises(WorkspaceError, match="gone"):
        store.create(runs_dir, make_record(), checkpoints=tmp_path / "gone")
    assert os.listdir(runs_dir) == []


def test_experiment_name_and_ended_status_of_a_run_are_read_without_parsing_its_job(runs_dir, monkeypatch):
    folder, fd = make_run(runs_dir, job=make_job())
    store._known.clear()
    monkeypatch.setattr(Job, "__post_init__", None)
    assert store.experiment(folder) == "digits"
    assert not store.has_ended(folder)
    write_json(folder.state, {"status": states.COMPLETED})
    assert store.has_ended(folder)
    os.close(fd)
    folder.job.unlink()
    with pytest.raises(RunNotFoundError, match="no readable record"):
        store.experiment(folder)
