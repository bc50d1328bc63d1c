from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import TargetError
from paceline.runs import remote_status, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.record import Attempt, utc_now
from paceline.runs.remote_status import Look
from paceline.system.files import write_json
from tests.helpers import RUN_ID, make_record, make_run, write_tree


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
    monkeypatch.setattr(remote_status, "_teller", lambda folder: engine)
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


class Far(Engine):
    """An engine whose jobs write in another folder; a look brings here what is new there."""

    def __init__(self, there):
        super().__init__()
        self.there, self.looks = there, 0

    def look(self, folder, record):
        self.looks += 1
        shutil.copytree(self.there, folder.path, dirs_exist_ok=True)
        return super().look(folder, record)


READS = {
    "metrics": (lambda run, top: run.get_metrics(), {"loss": 0.5}),
    "one metric": (lambda run, top: run.get_metrics("loss", rank=0), {"loss": 0.5}),
    "by rank": (lambda run, top: run.get_metrics(by_rank=True), {"0": {"loss": 0.5}}),
    "with children": (lambda run, top: list(run.get_metrics(recursive=True).values()), [{"loss": 0.5}]),
    "names": (lambda run, top: run.get_file_names(), ["logs/driver.log", "outputs/a"]),
    "file": (lambda run, top: Path(run.download_file("outputs/a", top / "copy")).read_text(), "1"),
    "files": (lambda run, top: run.download_files("outputs/", str(top)), ["TOP/outputs/a"]),
    "logs": (lambda run, top: [Path(path).read_text() for path in run.get_all_logs(top)], ["line\n"]),
    "details": (lambda run, top: run.get_details_with_logs()["logFiles"], {"logs/driver.log": "line\n"}),
    "tags": (lambda run, top: run.tags, {"phase": "late"}),
    "inputs": (lambda run, top: list(run.input_datasets), ["train"]),
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_run_that_writes_in_another_folder_has_what_is_new_there(monkeypatch, folder, tmp_path, read):
    run = folder()
    engine = Far(tmp_path / "there")
    monkeypatch.setattr(remote_status, "_teller", lambda folder: engine)
    write_json(run.engine, {"engine": "slurm", "job_id": "7", "mirrored": True})
    handle = pl.Run(pl.Experiment(pl.Workspace(tmp_path / "ws"), make_record().experiment), run.run_id)
    there = RunFolder(write_tree(tmp_path / "there", {"outputs/a": "1", "logs/driver.log": "line\n"}))
    there.metrics.mkdir()
    MetricLog(there.metric_log(0, 1), attempt=1).scalar("loss", 0.5, None)
    tags_and_properties.set_tags(there.notes, {"phase": "late"})
    write_json(there.data, {"inputs": [{"name": "train", "node_rank": 0}]})

    call, expected = READS[read]
    found = call(handle, tmp_path / "copies")

    assert str(found).replace(str(tmp_path / "copies"), "TOP") == str(expected)
    looks = engine.looks
    assert looks in range(1, 5), "targets keep their answers for a second or more"
    store.change(run, store.stored(run), states.COMPLETED, exit_code=0)
    call(handle, tmp_path / "copies2")
    assert engine.looks == looks, "its end comes last: all is here"


def test_an_engine_that_does_not_answer_leaves_what_is_read_as_it_is(engine, folder, tmp_path):
    run = folder()
    write_json(run.engine, {"engine": "slurm", "job_id": "7", "mirrored": True})
    engine.says = TargetError("no route")
    handle = pl.Run(pl.Experiment(pl.Workspace(tmp_path / "ws"), make_record().experiment), run.run_id)
    assert (handle.get_metrics(), handle.get_file_names()) == ({}, [])


def test_of_a_run_whose_folder_this_is_nobody_is_asked(monkeypatch, folder, tmp_path):
    run = folder()
    monkeypatch.setattr(remote_status, "_teller", None)
    handle = pl.Run(pl.Experiment(pl.Workspace(tmp_path / "ws"), make_record().experiment), run.run_id)
    assert (handle.get_metrics(), handle.get_file_names(), handle.tags) == ({}, [], {})
    write_json(run.engine, {"engine": "slurm", "job_id": "7", "mirrored": True})
    monkeypatch.setenv("PACELINE_RUN_ID", run.run_id)
    assert handle.get_metrics() == {}, "nor by the run's own processes"
