from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from paceline.errors import FileNameError, RunStateError
from paceline.workspace import Experiment, Workspace
from tests.helpers import start_python

PROGRAM = """
import os, signal, sys, threading, time
from paceline.workspace import Experiment, Workspace
run = Experiment(Workspace("ws"), "digits").start_logging()
run.log("loss", 1)
print(run.id, flush=True)
"""


@pytest.fixture
def experiment():
    return Experiment(Workspace("ws"), "digits")


def test_leaving_a_start_logging_block_completes_the_run(experiment):
    with experiment.start_logging() as run:
        assert (run.status, run.kind) == ("Running", "interactive")
        run.log("loss", 0.5)
    record = run.record()
    assert (record.status, record.exit_code) == ("Completed", 0)
    assert record.started_utc <= record.ended_utc
    assert run.get_metrics() == {"loss": 0.5}


def test_exception_in_a_start_logging_block_fails_the_run_with_its_traceback(experiment):
    with pytest.raises(ZeroDivisionError), experiment.start_logging() as run:
        1 / 0  # noqa: B018
    record = run.record()
    assert (record.status, record.exit_code, record.failure.cause) == ("Failed", 1, "exception")
    assert record.failure.exception == "ZeroDivisionError: division by zero"
    assert "1 / 0" in record.failure.traceback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "fail() was called without details."),
        (("bad data",), "bad data"),
        (("bad data", "E7"), "E7: bad data"),
        ((ValueError("bad batch"),), "ValueError: bad batch"),
    ],
)
def test_fail_stores_the_given_message_in_the_failure(experiment, arguments, message):
    run = experiment.start_logging()
    run.fail(*arguments)
    assert (run.status, run.failure.message) == ("Failed", message)


def test_complete_fail_and_cancel_do_not_change_the_state_of_an_ended_interactive_run(experiment):
    run = experiment.start_logging()
    run.complete()
    for call in (run.fail, run.cancel, run.complete):
        call()
    assert run.status == "Completed"


def test_cancel_ends_an_interactive_run_at_once(experiment):
    run = experiment.start_logging()
    run.cancel()
    assert (run.status, run.record().exit_code) == ("Canceled", 128 + signal.SIGTERM)


def test_interactive_run_can_be_canceled_but_not_completed_from_another_program(experiment):
    with start_python(PROGRAM + "sys.stdin.readline(); run.complete()", stdin=-1) as process:
        run = experiment.workspace.get_run(process.stdout.readline().strip())
        with pytest.raises(RunStateError, match=f"is logged by process {process.pid}"):
            run.complete()
        run.cancel()
        assert run.status == "CancelRequested"
        process.communicate("go\n")
    assert run.status == "Canceled"


@pytest.mark.parametrize(
    ("end", "status", "cause"),
    [
        ("", "Completed", None),
        ("run.complete()", "Completed", None),
        ("run.fail('no')", "Failed", "user"),
        ("raise ValueError('bad batch')", "Failed", "exception"),
        ("os._exit(0)", "Failed", "not_completed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Failed", "not_completed"),
    ],
)
def test_interactive_run_ends_with_its_program(experiment, end, status, cause):
    with start_python(PROGRAM + end, stderr=-3) as process:
        run = experiment.workspace.get_run(process.communicate()[0].strip())
    assert run.status == status
    assert (run.failure.cause if run.failure else None) == cause
    assert run.get_metrics() == {"loss": 1}


def test_deleting_the_folder_of_one_interactive_run_does_not_prevent_the_end_of_another(experiment):
    end = """
import shutil
other = Experiment(Workspace("ws"), "digits").start_logging()
print(other.id, flush=True)
shutil.rmtree(run.folder.path)
"""
    with start_python(PROGRAM + end, stderr=-3) as process:
        _, other = process.communicate()[0].split()
    assert experiment.workspace.get_run(other).status == "Completed"


def test_end_of_a_forked_child_does_not_end_the_run(experiment):
    end = "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.wait(); print(run.status, flush=True)"
    with start_python(PROGRAM + end) as process:
        run_id, status = process.communicate()[0].split()
    assert status == "Running"
    assert experiment.workspace.get_run(run_id).status == "Completed"


def test_child_run_with_an_existing_id_is_refused(experiment):
    parent = experiment.start_logging()
    child = parent.child_run(run_id="my-run.1")
    assert child.id == "my-run.1"
    with pytest.raises(RunStateError, match=r"there is a run 'my-run\.1' already"):
        parent.child_run(run_id="my-run.1")
    child.complete()
    parent.complete()


@pytest.mark.parametrize("run_id", ["../evil", "a/b", ".x", " "])
def test_child_run_id_outside_the_workspace_is_refused(experiment, run_id):
    with experiment.start_logging() as parent, pytest.raises(FileNameError):
        parent.child_run(run_id=run_id)


def test_leaving_start_logging_blocks_closes_all_files_of_their_runs(experiment):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's /proc")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with experiment.start_logging():
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_start_logging_with_a_snapshot_directory_stores_a_snapshot(experiment, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("print()")
    with experiment.start_logging(snapshot_directory="code", display_name="my run") as run:
        pass
    assert run.restore_snapshot("back") == "back"
    assert (tmp_path / "back/train.py").read_text() == "print()"
    assert run.display_name == "my run"
