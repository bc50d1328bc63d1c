from __future__ import annotations

import os

import pytest

from paceline.errors import TargetError
from paceline.runs import elsewhere, states, store
from paceline.runs.elsewhere import Look
from paceline.runs.files import write_json
from paceline.runs.record import Attempt, utc_now
from tests.helpers import RUN_ID, make_run


class Engine:
    """Says what it is told to say."""

    def __init__(self):
        self.says = Look(state="running")
        self.canceled = 0

    def look(self, folder, record):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def cancel(self, folder, record):
        self.canceled += 1


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(elsewhere, "_teller", lambda folder: engine)
    return engine


@pytest.fixture
def folder(tmp_path):
    """A run whose supervisor is on another machine: nobody here holds its lock."""

    def make(status=states.RUNNING, **values):
        folder, fd = make_run(tmp_path / "ws/runs", RUN_ID, status, **values)
        os.close(fd)
        write_json(folder.engine, {"engine": "slurm", "job_id": "7"})
        return folder

    return make


def gone_for(folder, seconds):
    store.read(folder)
    since = folder.gone.stat().st_mtime - seconds
    os.utime(folder.gone, (since, since))


def test_a_run_whose_lock_nobody_holds_lives_as_long_as_the_engine_says_so(engine, folder):
    run = folder()
    assert store.read(run).status == states.RUNNING
    engine.says = Look(state="queued", message="Priority: 3 jobs ahead")
    found = store.read(run)
    assert (found.status, found.waiting_for) == (states.QUEUED, "Priority: 3 jobs ahead")
    assert store.stored(run).status == states.RUNNING  # readers write nothing that only the supervisor knows


@pytest.mark.parametrize(
    "says", [Look(state="unreachable", message="no route"), TargetError("no route")], ids=["look", "error"]
)
def test_an_engine_that_does_not_answer_makes_no_run_fail(engine, folder, says):
    run = folder()
    engine.says = says
    found = store.read(run)
    assert (found.status, found.waiting_for, found.is_terminal) == (states.NOT_RESPONDING, "no route", False)


def test_a_disk_without_room_for_what_comes_back_makes_no_run_fail(engine, folder):
    run = folder()
    engine.says = OSError(28, "No space left on device", "/ws/uploads/model")
    found = store.read(run)
    assert (found.status, found.is_terminal) == (states.NOT_RESPONDING, False)
    assert found.waiting_for == "/ws/uploads/model: No space left on device"


def test_a_job_that_is_gone_gets_a_moment_for_its_record_to_arrive(engine, folder):
    run = folder()
    engine.says = Look(state="gone", cause="failed", message="gone")
    assert store.read(run).status == states.RUNNING
    store.change(run, store.stored(run), states.COMPLETED, exit_code=0)
    assert store.read(run).status == states.COMPLETED


@pytest.mark.parametrize(
    ("cause", "status", "exit_code"),
    [
        ("canceled", states.CANCELED, 143),
        ("time_limit", states.FAILED, 124),
        ("preempted", states.FAILED, 75),
        ("node_lost", states.FAILED, 1),
    ],
)
def test_the_end_that_no_supervisor_could_write_is_written_once(engine, folder, cause, status, exit_code):
    run = folder(attempts=(Attempt(number=1, started_utc=utc_now(), nodes=("n1",)),))
    engine.says = Look(state="gone", cause=cause, message="The job was ended.", by="root")
    gone_for(run, 60)
    found = store.read(run)
    assert (found.status, found.exit_code) == (status, exit_code)
    assert store.stored(run).to_json() == found.to_json()
    assert found.attempts[-1].cause == cause
    assert (found.canceled_by, found.failure) == ("root", None) if cause == "canceled" else found.failure.cause == cause
    assert not run.gone.exists()
    engine.says = Look(state="running")
    assert store.read(run).status == status


def test_a_run_that_its_engine_has_ended_waits_for_nothing(engine, folder):
    # Story: after scancel the supervisor leaves the end to the engine; the canceled run "waited for" that for ever.
    run = folder(states.QUEUED, waiting_for="interrupted by the engine")
    engine.says = Look(state="gone", cause="canceled", by="root")
    gone_for(run, 60)
    assert (store.read(run).status, store.stored(run).waiting_for) == (states.CANCELED, None)


def test_a_job_that_comes_back_starts_the_wait_anew(engine, folder):
    run = folder()
    engine.says = Look(state="gone", cause="failed")
    gone_for(run, 60)
    engine.says = Look(state="running")
    assert store.read(run).status == states.RUNNING
    engine.says = Look(state="gone", cause="failed")
    assert store.read(run).status == states.RUNNING


def test_a_job_that_is_canceled_in_the_queue_ends_at_once(engine, folder):
    run = folder(states.NOT_STARTED)
    store.request_cancel(run, "me")
    engine.says = Look(state="gone", cause="canceled", by="uid 1000")
    found = store.read(run)
    assert (found.status, found.canceled_by) == (states.CANCELED, "me")


def test_a_cancel_reaches_the_engine_and_the_folder(engine, folder):
    run = folder()
    store.request_cancel(run, "me")
    assert (engine.canceled, run.cancel_request.exists()) == (1, True)
    assert store.read(run).status == states.CANCEL_REQUESTED
