"""A run seen through on nodes that come and go, and by supervisors that an engine starts again.

In a process of its own: a supervisor ends all that is below it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paceline
from paceline.runs import states, store, tags_and_properties
from paceline.runs.failure import CAUSES, FailureReport
from paceline.runs.record import Attempt, RunRecord, utc_at
from paceline.supervisor.diagnosis.retries import RETRIED, RETRIED_IF_ASKED, comes_again, is_retried
from paceline.system import processes
from paceline.system.files import write_json
from tests.helpers import make_job, make_run, wait_until, write_tree

SOURCE = str(Path(paceline.__file__).parent.parent)
STAGE = Path(__file__).with_name("stage.py")

#: This script writes its pid. Its first attempt then waits until it is killed, and later attempts end successfully.
WAITS = """
import os, time
attempt = os.environ["PACELINE_ATTEMPT"]
open("left", "a").write(attempt)
open("pid", "w").write(str(os.getpid()))
os.rename("pid", f"outputs/pid_{attempt}")
if attempt == "1":
    time.sleep(600)
open("outputs/seen", "w").write(open("left").read())
"""
#: This script does the same as WAITS, but ignores SIGTERM.
IGNORES = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAITS}"
LOSES = """
import os, time
if os.environ["PACELINE_ATTEMPT"] == "1":
    open("outputs/lose", "w")
    time.sleep(600)
os.remove("outputs/lose")
"""

ASKED = make_job(max_restarts=3, restart_on_exception=True)
NOT_ASKED = make_job(max_restarts=3)


class Stage:
    """One run and its supervisors."""

    def __init__(self, tmp_path: Path, script: str, *, is_of_engine: bool = False, **job) -> None:
        values = {"grace_period_seconds": 5, **job}
        self.folder, fd = make_run(tmp_path / "ws/runs", job=make_job(**values), target="lab")
        os.close(fd)
        source = write_tree(tmp_path / "ws/snapshots/1", {"train.py": script})
        self.folder.snapshot.symlink_to(source)
        if is_of_engine:
            write_json(self.folder.engine, {"engine": "slurm", "job_id": "7"})

    def start(self, *plan) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([SOURCE, str(STAGE.parents[2])])
        command = [sys.executable, str(STAGE), str(self.folder.path), json.dumps(plan)]
        with open(self.folder.driver_log, "ab") as log:
            return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)

    def see_through(self, *plan):
        """The record once a supervisor has ended that gets these nodes."""
        assert self.start(*plan).wait(180) == 0, self.folder.driver_log.read_text()
        return self.record()

    def interrupt(self, number: int, *plan):
        """The record after a supervisor was sent this signal while the first attempt's worker ran."""
        process = self.start(*plan)
        self.worker()
        process.send_signal(number)
        process.wait(180)
        return self.record()

    def worker(self, attempt: int = 1) -> int:
        path = self.folder.outputs / f"pid_{attempt}"
        wait_until(path.exists, "the worker is there")
        return int(path.read_text())

    def record(self):
        return store.stored(self.folder)

    def told(self) -> list[str]:
        return (self.folder.path / "told").read_text().splitlines()


def attempts(record) -> list[tuple[int, str | None, tuple[str, ...]]]:
    return [(attempt.number, attempt.cause, attempt.nodes) for attempt in record.attempts]


A, B = {"name": "a"}, {"name": "b"}
LOST = {"name": "a", "is_lost": True}
TAKEN = {"name": "a", "leaves": "the node is drained"}


#: This script stops itself with SIGSTOP, and saves a file when it gets SIGTERM.
STOPPED = """
import os, signal, time
def save(number, frame):
    open("outputs/saved", "w").close()
    raise SystemExit(3)
signal.signal(signal.SIGTERM, save)
open("pid", "w").write(str(os.getpid()))
os.rename("pid", "outputs/pid_1")
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def test_suspended_worker_is_resumed_on_cancellation_so_that_it_can_save_before_it_ends(tmp_path):
    # Regression: a suspended worker could not react to the cancellation. It was killed after the grace period, without
    # having saved a checkpoint.
    stage = Stage(tmp_path, STOPPED, grace_period_seconds=600)
    process = stage.start(A)
    worker = stage.worker()
    wait_until(
        lambda: Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the worker is stopped"
    )
    process.send_signal(signal.SIGTERM)
    process.wait(180)
    assert stage.record().status == states.CANCELED
    assert (stage.folder.outputs / "saved").exists()


def test_run_is_queued_again_if_the_engine_ends_its_worker_before_signaling_the_supervisor(tmp_path):
    # Regression: scancel sends a signal to all processes of a job. If a worker ended before the supervisor got its
    # signal, the run was recorded as Failed (2 of 18 runs).
    stage = Stage(tmp_path, WAITS, is_of_engine=True)
    # By default, the engine's signal has to come within 2 s. A busy machine may stop this process for longer.
    process = stage.start({**A, "signal_s": 120})
    worker = stage.worker()
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not processes.is_alive(worker), "the worker has ended")
    process.send_signal(signal.SIGTERM)
    process.wait(180)
    record = stage.record()
    assert (record.status, record.waiting_for, record.failure) == (states.QUEUED, "interrupted by the engine", None)


def test_externally_terminated_worker_fails_the_run(tmp_path):
    stage = Stage(tmp_path, WAITS, is_of_engine=True)
    process = stage.start(A)
    os.kill(stage.worker(), signal.SIGTERM)
    process.wait(180)
    assert (stage.record().status, stage.record().exit_code) == (states.FAILED, 143)


def test_hang_of_the_last_attempt_is_not_shown_for_the_next_attempt_on_the_same_nodes(tmp_path):
    stage = Stage(tmp_path, "")
    hang = {"since_utc": "2026-11-23T06:12:03.000Z", "text": "rank 0 waits", "report": "hang.txt"}
    store.change(stage.folder, stage.record(), states.STARTING, hang=hang)
    record = stage.see_through(A)
    assert (record.status, record.hang) == (states.COMPLETED, None)


# --- Lost nodes


def test_the_attempt_after_a_lost_node_runs_on_other_nodes(tmp_path):
    stage = Stage(tmp_path, LOSES, max_restarts=1)
    record = stage.see_through(LOST, B)
    assert (record.status, record.exit_code) == (states.COMPLETED, 0)
    assert attempts(record) == [(1, "node_lost", ("a",)), (2, None, ("b",))]
    assert stage.told() == ["gave a", "took a", "gave b", "took b", "released"]


#: Rank 1 becomes silent when its node is lost. Rank 0 fails first, because it loses its connection or for a reason of its own.
PEER_GONE = """
import os, time
if os.environ["PACELINE_ATTEMPT"] == "1":
    if os.environ["PACELINE_RANK"] == "1":
        open("outputs/lose", "w")
        time.sleep(600)
    while not os.path.exists("outputs/lose"):
        time.sleep(0.01)
    raise {error}
if os.environ["PACELINE_RANK"] == "0":
    os.remove("outputs/lose")
"""
TWO_NODES = {"distributed_backend": "gloo", "node_count": 2, "max_restarts": 1, "grace_period_seconds": 0.1}


def test_failed_worker_is_not_blamed_if_the_node_of_its_peer_is_found_lost_afterwards(tmp_path):
    stage = Stage(tmp_path, PEER_GONE.format(error="ConnectionResetError('Connection reset by peer')"), **TWO_NODES)
    record = stage.see_through({"name": "a", "cut_for_s": 1.5}, B)
    assert attempts(record) == [(1, "node_lost", ("a", "c")), (2, None, ("b", "c"))]


def test_exception_of_a_worker_is_reported_before_a_node_lost_later(tmp_path):
    stage = Stage(tmp_path, PEER_GONE.format(error="ValueError('wrong')"), **TWO_NODES)
    record = stage.see_through({"name": "a", "cut_for_s": 0.5})
    assert attempts(record) == [(1, "exception", ("a", "c"))]
    assert "ValueError: wrong" in record.failure.message


def test_end_of_a_worker_on_a_node_whose_clock_is_ahead_ends_the_attempt_at_once(tmp_path):
    script = (
        'import os, signal, time\nif os.environ["PACELINE_RANK"] == "1":\n    os.kill(os.getpid(), signal.SIGKILL)\n'
    )
    stage = Stage(tmp_path, f"{script}time.sleep(60)", distributed_backend="gloo", node_count=2)
    record = stage.see_through({"name": "a", "ahead_s": 300})
    assert (record.failure.rank, record.failure.signal) == (1, "SIGKILL")
    assert record.duration_s < 30


#: This script writes an error file as torch does below a worker, and then goes on.
TORCH = """
import json, os, time
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({{"message": {message!r}}}, file)
{rest}
"""
MESSAGE: dict[str, object] = {
    "message": "ValueError: bad batch\nmore",
    "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"},
    "errorCode": 1,
}


def after_torch(tmp_path: Path, message: object, rest: str) -> RunRecord:
    script = TORCH.format(message=message, rest=rest)
    return Stage(tmp_path, script, distributed_backend="gloo").see_through(A)


@pytest.mark.parametrize(
    ("message", "traceback"),
    [(MESSAGE, "Traceback"), ("ValueError: bad batch", None)],
    ids=["message with a traceback", "string"],
)
def test_error_that_torch_wrote_is_the_exception_of_a_worker_that_fails(tmp_path, message, traceback):
    failure = after_torch(tmp_path, message, "os._exit(3)").failure
    assert (failure.cause, failure.exit_code, failure.exception) == ("exception", 3, "ValueError: bad batch")
    assert (failure.message, failure.traceback) == ("The worker failed: ValueError: bad batch", traceback)


@pytest.mark.parametrize("message", [5, ["x"], {"message": 5}, {"message": "x", "extraInfo": "y"}, {}, None])
def test_error_file_of_an_unknown_form_leaves_the_exit_code_as_the_cause(tmp_path, message):
    failure = after_torch(tmp_path, message, "os._exit(3)").failure
    assert (failure.cause, failure.exit_code) == ("exception", 3)
    assert "ended with exit code 3" in failure.message


def test_worker_that_handles_an_error_below_it_continues_and_completes(tmp_path):
    record = Stage(
        tmp_path, TORCH.format(message=MESSAGE, rest="time.sleep(5)"), distributed_backend="gloo"
    ).see_through(A)
    assert (record.status, record.failure) == (states.COMPLETED, None)


def test_error_that_the_script_has_handled_does_not_explain_a_later_kill(tmp_path):
    failure = after_torch(tmp_path, MESSAGE, "time.sleep(0.5); os.kill(os.getpid(), 9)").failure
    assert (failure.cause, failure.signal) == ("killed", "SIGKILL")


def test_own_exception_of_a_worker_is_reported_after_a_handled_error_below_it(tmp_path):
    failure = after_torch(tmp_path, MESSAGE, "time.sleep(1); raise KeyError('own')").failure
    assert failure.exception == "KeyError: 'own'"


def test_run_without_restarts_fails_with_the_name_of_the_lost_node(tmp_path):
    record = Stage(tmp_path, LOSES).see_through(LOST)
    assert (record.status, record.exit_code, record.failure.cause) == (states.FAILED, 1, "node_lost")
    assert record.failure.message == "Node a was lost, with rank 0: nothing heard for 15 s."


def test_lost_node_is_the_cause_if_no_replacement_exists(tmp_path):
    record = Stage(tmp_path, LOSES, max_restarts=1).see_through(LOST, "only 1 node is left.")
    assert attempts(record) == [(1, "node_lost", ("a",))]
    assert record.failure.cause == "node_lost"
    assert record.failure.message.endswith("15 s. There were no nodes for another attempt: only 1 node is left.")


def test_run_that_gets_no_nodes_fails_with_the_message_of_the_engine(tmp_path):
    record = Stage(tmp_path, "").see_through("partition 'gpu' is down.")
    assert (record.failure.cause, record.failure.message) == ("engine", "partition 'gpu' is down.")
    assert record.attempts == ()


def test_a_killed_worker_is_started_again_on_the_same_nodes(tmp_path):
    script = "import os, signal\nif os.environ['PACELINE_ATTEMPT'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    stage = Stage(tmp_path, script, max_restarts=1)
    assert attempts(stage.see_through(A)) == [(1, "killed", ("a",)), (2, None, ("a",))]
    assert stage.told() == ["gave a", "took a", "released"]


# --- Times in the record


@pytest.mark.parametrize("plan", [A, {"breaks": "a slip"}], ids=["completed", "failed internally"])
def test_end_of_a_run_is_recorded_before_its_resources_are_released(tmp_path, plan):
    # Regression: a run that waited for the cores of another run started before the end of the other run was recorded.
    stage = Stage(tmp_path, "")
    stage.start(plan).wait(180)
    record = stage.record()
    assert record.is_terminal
    assert record.ended_utc <= (stage.folder.path / "released_utc").read_text()


@pytest.mark.parametrize(("number", "words"), [(5, "fails: [Errno 5]"), (28, "is full. Free some space")])
def test_disk_error_within_an_attempt_is_recorded_as_such_and_ends_the_attempt(tmp_path, number, words):
    # Regression: after an I/O error the record called it an error of Paceline's own, and the attempt had no end.
    record = Stage(tmp_path, "").see_through({**A, "errno": number})
    assert (record.status, record.failure.cause) == (states.FAILED, "disk")
    assert words in record.failure.message
    assert (record.attempts[0].cause, record.attempts[0].ended_utc) == ("disk", record.ended_utc)


def test_attempt_that_is_stopped_before_its_start_leaves_its_number_to_the_next(tmp_path):
    # Regression: the record had an attempt 2 and no attempt 1. If the engine then restarted the job, the next attempt
    # had the number 2 too, and wrote into the logs of the first.
    record = Stage(tmp_path, "").see_through({**TAKEN, "at_once": True}, A)
    assert attempts(record) == [(1, None, ("a",))]


# --- Engines that end or restart the job


def test_preempted_run_is_queued_and_continues(tmp_path):
    stage = Stage(tmp_path, WAITS, is_of_engine=True, max_restarts=1)
    record = stage.interrupt(signal.SIGTERM, A)
    assert (record.status, record.waiting_for) == (states.QUEUED, "interrupted by the engine")
    assert attempts(record) == [(1, "interrupted", ("a",))]
    assert not processes.is_alive(stage.worker())

    record = stage.see_through(B)
    assert (record.status, record.waiting_for) == (states.COMPLETED, None)
    assert attempts(record) == [(1, "preempted", ("a",)), (2, None, ("b",))]
    # Both attempts ran in the same working directory.
    assert (stage.folder.outputs / "seen").read_text() == "12"


def test_run_preempted_by_the_engine_continues_even_if_no_restarts_are_allowed(tmp_path):
    stage = Stage(tmp_path, WAITS, is_of_engine=True, max_restarts=0)
    stage.interrupt(signal.SIGTERM, A)
    assert attempts(stage.see_through(B)) == [(1, "preempted", ("a",)), (2, None, ("b",))]


def test_run_on_a_preempted_node_continues_on_another_node_without_using_a_restart(tmp_path):
    stage = Stage(tmp_path, LOSES, max_restarts=0)
    record = stage.see_through(TAKEN, B)
    assert attempts(record) == [(1, "preempted", ("a",)), (2, None, ("b",))]
    assert record.attempts[1].reason == "preempted: the node is drained"
    assert stage.told() == ["gave a", "took a", "gave b", "took b", "released"]


def test_loss_of_a_node_that_is_being_drained_counts_as_a_preemption(tmp_path):
    record = Stage(tmp_path, LOSES, max_restarts=0).see_through({**LOST, **TAKEN}, B)
    assert attempts(record) == [(1, "preempted", ("a",)), (2, None, ("b",))]


def test_run_ends_after_ten_preemptions_before_its_workers_started(tmp_path):
    record = Stage(tmp_path, LOSES, max_restarts=3).see_through(*[{**TAKEN, "at_once": True}] * 10)
    assert (record.status, record.exit_code, record.failure.cause) == (states.FAILED, 75, "preempted")
    assert "10 times in a row" in record.failure.message
    assert "the node is drained" in record.failure.message


def test_attempt_is_preempted_if_the_engine_interrupts_it_before_its_supervisor_is_killed(tmp_path):
    stage = Stage(tmp_path, IGNORES, is_of_engine=True, max_restarts=0, grace_period_seconds=600)
    process = stage.start(A)
    worker = stage.worker()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: stage.record().attempts[0].cause == "interrupted", "the interruption is recorded")
    process.kill()
    process.wait(180)
    processes.send(worker, signal.SIGKILL)
    assert attempts(stage.see_through(B)) == [(1, "preempted", ("a",)), (2, None, ("b",))]


def test_loss_of_the_node_of_the_supervisor_fails_the_run_if_no_restart_is_allowed(tmp_path):
    stage = Stage(tmp_path, WAITS, is_of_engine=True, max_restarts=0)
    stage.interrupt(signal.SIGKILL, A)
    processes.send(stage.worker(), signal.SIGKILL)
    record = stage.see_through(B)
    assert (record.status, record.exit_code, record.failure.cause) == (states.FAILED, 75, "node_lost")
    assert "max_restarts=0 allows no further attempt" in record.failure.message
    assert stage.told() == ["gave a", "released"]


def test_new_supervisor_after_a_killed_supervisor_starts_the_next_attempt(tmp_path):
    stage = Stage(tmp_path, WAITS, is_of_engine=True, max_restarts=1)
    assert stage.interrupt(signal.SIGKILL, A).attempts[0].ended_utc is None
    processes.send(stage.worker(), signal.SIGKILL)  # the engine would also kill the other processes of its job
    # The supervisor may have been killed while it replaced this link.
    (stage.folder.logs / ".rank_0.log").symlink_to("nowhere")
    record = stage.see_through(B)
    assert attempts(record) == [(1, "node_lost", ("a",)), (2, None, ("b",))]
    assert record.attempts[0].ended_utc is not None
    assert record.status == states.COMPLETED


def test_run_preempted_before_its_first_attempt_still_starts_that_attempt(tmp_path):
    stage = Stage(tmp_path, WAITS.replace('"1"', '"0"'), is_of_engine=True)
    store.change(stage.folder, stage.record(), states.QUEUED, waiting_for="interrupted by the engine")
    assert attempts(stage.see_through(A)) == [(1, None, ("a",))]


def test_time_limit_warning_of_the_engine_fails_the_run_with_cause_time_limit(tmp_path):
    record = Stage(tmp_path, WAITS, is_of_engine=True, max_restarts=3).interrupt(signal.SIGUSR2, A)
    assert (record.status, record.exit_code, record.failure.cause) == (states.FAILED, 124, "time_limit")
    assert "The time that 'lab' gives the job was nearly up" in record.failure.message


def test_time_of_earlier_attempts_counts_towards_the_time_limit(tmp_path):
    stage = Stage(tmp_path, WAITS, is_of_engine=True, max_restarts=1, max_run_duration_seconds=60)
    earlier = Attempt(number=1, started_utc="2026-01-01T00:00:00.000Z", ended_utc="2026-01-01T01:00:00.000Z")
    store.change(stage.folder, stage.record(), states.QUEUED, attempts=(earlier,))
    record = stage.see_through(A)
    assert (record.exit_code, record.failure.cause, len(record.attempts)) == (124, "time_limit", 1)


def test_time_in_the_queue_after_a_lost_node_does_not_count_towards_the_time_limit(tmp_path):
    stage = Stage(
        tmp_path, WAITS.replace('"1"', '"0"'), is_of_engine=True, max_restarts=1, max_run_duration_seconds=86_400
    )
    now = time.time()
    started, ended = utc_at(now - 30 * 3600), utc_at(now - 20 * 3600)
    store.change(stage.folder, stage.record(), states.RUNNING, attempts=(Attempt(number=1, started_utc=started),))
    log = stage.folder.rank_log(1, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    os.utime(stage.folder.state, (now - 29 * 3600,) * 2)
    os.utime(log, (now - 20 * 3600,) * 2)
    record = stage.see_through(A)
    assert (record.status, record.attempts[0].cause, record.attempts[0].ended_utc) == (
        states.COMPLETED,
        "node_lost",
        ended,
    )


# --- Files that stay on a node


KEEPS = {"name": "a", "keeps": "outputs/model.pt is still in a:/tmp/paceline-me/runs/1."}


@pytest.mark.parametrize(
    ("script", "cause", "begins"),
    [("", "data", ""), ("raise ValueError('wrong')", "exception", "The worker failed: ValueError: wrong ")],
)
def test_failure_message_names_the_node_and_folder_of_files_that_were_not_fetched(tmp_path, script, cause, begins):
    stage = Stage(tmp_path, script)
    record = stage.see_through(KEEPS)
    assert (record.status, record.failure.cause) == (states.FAILED, cause)
    assert record.failure.message == f"{begins}{KEEPS['keeps']}"
    assert tags_and_properties.read(stage.folder.notes).properties == {"not_fetched": KEEPS["keeps"]}


def test_elastic_run_continues_without_files_of_a_lost_node(tmp_path):
    stage = Stage(tmp_path, LOSES, node_count="1..2", distributed_backend="gloo", grace_period_seconds=0)
    record = stage.see_through({**LOST, **KEEPS}, B)
    assert attempts(record) == [(1, "node_lost", ("a", "c")), (2, None, ("b",))]
    # Only the log of the supervisor mentions files that are still on the lost node.
    assert record.attempts[1].reason == "Node a was lost, with rank 0: nothing heard for 15 s"
    assert tags_and_properties.read(stage.folder.notes).properties == {}
    assert KEEPS["keeps"] in stage.folder.driver_log.read_text()


def test_canceled_run_stores_the_node_and_folder_of_unfetched_files_in_a_property(tmp_path):
    stage = Stage(tmp_path, WAITS)
    record = stage.interrupt(signal.SIGTERM, KEEPS)
    assert (record.status, record.canceled_by) == (states.CANCELED, "SIGTERM")
    assert tags_and_properties.read(stage.folder.notes).properties == {"not_fetched": KEEPS["keeps"]}


# --- Targets that can't be loaded


def test_run_fails_with_the_reason_if_its_target_plugin_cannot_be_loaded(tmp_path):
    stage = Stage(tmp_path, "")
    write_json(stage.folder.target, {"name": "lab", "kind": "no such", "settings": {}})
    code = """
import sys
from pathlib import Path
from paceline.runs.claim import Claim
from paceline.runs.folder import RunFolder
from paceline.supervisor.supervise import supervise
from paceline.system import locks
folder = RunFolder(Path(sys.argv[1]))
supervise(folder, Claim(folder.lock, locks.claimed(folder.lock) or b""))
"""
    subprocess.run([sys.executable, "-c", code, str(stage.folder.path)], check=True, timeout=180)
    record = stage.record()
    assert (record.status, record.failure.cause) == (states.FAILED, "engine")
    assert "there is no kind 'no such'" in record.failure.message


def report(cause: str, exception: str | None = None, traceback: str = "") -> FailureReport:
    return FailureReport(cause=cause, message="Rank 0 failed.", exception=exception, traceback=traceback)


def test_lost_nodes_and_killed_workers_are_retried_and_exceptions_only_on_request():
    assert {cause for cause in CAUSES if is_retried(report(cause), NOT_ASKED)} == RETRIED
    assert {cause for cause in CAUSES if is_retried(report(cause), ASKED)} == RETRIED | RETRIED_IF_ASKED
    assert {"node_lost", "preempted", "port", "killed", "launcher"} == RETRIED
    assert {"exception", "memory"} == RETRIED_IF_ASKED


AT_THE_TOP = """Traceback (most recent call last):
  File "/w/work/train.py", line 3, in <module>
    import helper
  File "/w/work/helper.py", line 1, in <module>
    import torhc
ModuleNotFoundError: No module named 'torhc'
"""
BY_NAME = """Traceback (most recent call last):
  File "/w/work/train.py", line 3, in <module>
    importlib.import_module("models.large")
  File "/usr/lib/python3.11/importlib/__init__.py", line 126, in import_module
    return _bootstrap._gcd_import(name[level:], package, level)
  File "<frozen importlib._bootstrap>", line 1204, in _gcd_import
ModuleNotFoundError: No module named 'models'
"""
INSTEAD = """Traceback (most recent call last):
  File "/w/work/train.py", line 8, in first
    import fast
ModuleNotFoundError: No module named 'fast'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/w/work/train.py", line 3, in <module>
    import slow
ModuleNotFoundError: No module named 'slow'
"""
LATER = """Traceback (most recent call last):
  File "/w/work/train.py", line 30, in <module>
    main()
  File "/w/work/train.py", line 20, in main
    import plots
ModuleNotFoundError: No module named 'plots'
"""
SYNTAX = """  File "/w/work/train.py", line 1
    def
       ^
SyntaxError: invalid syntax
"""


@pytest.mark.parametrize(
    ("exception", "traceback", "again"),
    [
        ("ModuleNotFoundError: No module named 'torhc'", AT_THE_TOP, True),
        ("ModuleNotFoundError: No module named 'models'", BY_NAME, True),
        ("ModuleNotFoundError: No module named 'slow'", INSTEAD, True),
        ("SyntaxError: invalid syntax", SYNTAX, True),
        ("IndentationError: unexpected indent", SYNTAX, True),
        ("ModuleNotFoundError: No module named 'plots'", LATER, False),
        ("ValueError: bad batch", AT_THE_TOP, False),
        (None, "", False),
    ],
)
def test_error_while_a_script_is_loaded_is_not_retried_but_a_runtime_error_is(exception, traceback, again):
    found = report("exception", exception, traceback)
    assert comes_again(found) == again
    assert is_retried(found, ASKED) == (not again)
