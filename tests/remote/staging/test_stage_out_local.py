"""Outputs of a run on another machine, stored on this machine by any reader."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.data.transfer import upload
from paceline.errors import DataError
from paceline.job.data_reference import DataReference
from paceline.remote.replica.apply import ReplicaError
from paceline.remote.staging import stage_out_local
from paceline.remote.staging.stage_out_local import expect, is_over, settle, take_record
from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.system import locks
from paceline.system.files import json_lines, read_json, write_json
from tests.helpers import make_job, make_run, start_python, write_tree

FILES = {"a.pt": "one", "deep/b.pt": "three"}
#: This program calls `settle`, which stores a run's outputs in the datastore. It kills itself once the datastore has
#: the given number of files.
KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.remote.staging.stage_out_local import settle
from paceline.data.transfer import upload
from paceline.runs.folder import RunFolder

put = upload._put_file
upload._AT_ONCE = 1
def put_one(store, file, path, by_content):
    if not left:
        target = store.local(path)
        target.parent.mkdir(exist_ok=True)
        target.with_name(f"{upload._MARK}-half").write_text("on")
        os.kill(os.getpid(), signal.SIGKILL)
    left.pop()
    put(store, file, path, by_content)
left = [None] * int(sys.argv[2])
upload._put_file = put_one
settle(RunFolder(Path(sys.argv[1])))
"""


class Trip:
    """A run with an output to a folder of this machine that has been elsewhere."""

    def __init__(self, top: Path, **options: Any) -> None:
        self.stored = top / "store" / "m"
        self.lab = pl.Datastore.register(pl.Workspace(top / "ws"), "lab", top / "store")
        self.output: DataReference = self.lab.path("m", "model").as_upload(**options)
        self.folder, fd = make_run(top / "ws" / "runs", job=make_job(inputs=(self.output,)))
        os.close(fd)
        expect(self.folder, ["model"])

    def come_back(self, status: str = states.COMPLETED, left: Any = None, **values: Any) -> None:
        """Everything that a target brings, the record last."""
        there = RunRecord.from_json({**store.stored(self.folder).to_json(), "status": status})
        write_tree(self.folder.uploads / "model", FILES)
        if left is None:
            left = {"model": {name: len(text) for name, text in FILES.items()}}
        self.folder.left.parent.mkdir(exist_ok=True)
        write_json(self.folder.left, left)
        write_json(self.folder.data, {"inputs": [], "outputs": [self.output.to_json()]})
        events = [{"status": states.NOT_STARTED}, {"status": states.FINALIZING}, {"status": status}]
        self.folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        record = {**there.to_json(), "exit_code": 0, "ended_utc": "2026-01-01T00:00:00.000Z", **values}
        take_record(self.folder, json.dumps(record).encode())

    @property
    def record(self) -> RunRecord:
        return store.stored(self.folder)

    def texts(self) -> dict[str, str]:
        found = [path for path in self.stored.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.stored)): path.read_text() for path in found}


@pytest.fixture
def trip(tmp_path: Path) -> Trip:
    return Trip(tmp_path)


def test_run_ends_after_its_outputs_are_stored(trip: Trip) -> None:
    assert not settle(trip.folder)
    trip.come_back()

    assert (trip.record.status, trip.record.exit_code, trip.record.ended_utc) == (states.FINALIZING, None, None)
    assert [event["status"] for event in json_lines(trip.folder.events)] == [states.NOT_STARTED, states.FINALIZING]
    assert trip.texts() == {}

    assert settle(trip.folder)
    assert (trip.record.status, trip.record.exit_code) == (states.COMPLETED, 0)
    assert trip.record.ended_utc == "2026-01-01T00:00:00.000Z", "when it ended there, not when somebody looked"
    assert [event["status"] for event in json_lines(trip.folder.events)][-1:] == [states.COMPLETED]
    assert trip.texts() == FILES
    (told,) = read_json(trip.folder.data)["outputs"]
    assert (told["name"], told["files"], told["bytes"]) == ("model", 2, 8)
    assert "2 files, 8 B, stored at 'm'" in trip.folder.prepare_log(0).read_text()
    assert not list(trip.folder.uploads.iterdir())
    assert not trip.folder.home.exists()
    assert not settle(trip.folder)


@pytest.mark.promise("output-dataset-one-run-completed")
def test_output_is_registered_as_a_dataset_on_completion(tmp_path: Path) -> None:
    trip = Trip(tmp_path)
    wanted = trip.output.register_on_complete("models", "of a run", {"a": "b"})
    job = read_json(trip.folder.job)
    write_json(trip.folder.job, {**job, "job": {**job["job"], "inputs": [wanted.to_json()]}})
    trip.come_back()
    settle(trip.folder)
    found = pl.Dataset.get_by_name(pl.Workspace(tmp_path / "ws"), "models")
    assert (found.to_path(), found.description, found.tags) == (["/a.pt", "/deep/b.pt"], "of a run", {"a": "b"})
    assert read_json(trip.folder.data)["outputs"][0]["dataset"] == "models:1"
    with pytest.raises(DataError, match="not an output"):
        trip.lab.path("m").register_on_complete("models")


def test_outputs_are_not_stored_while_another_process_holds_the_run_lock(trip: Trip) -> None:
    trip.come_back()
    fd = locks.take(trip.folder.lock)
    assert fd is not None
    assert settle(trip.folder), "nobody is to be asked for the run any more"
    assert trip.record.status == states.FINALIZING
    os.close(fd)
    settle(trip.folder)
    assert trip.record.status == states.COMPLETED


@pytest.mark.parametrize("files", [0, 1])
def test_killed_output_upload_is_completed_without_duplicates_when_outputs_are_stored_again(
    trip: Trip, files: int
) -> None:
    trip.come_back()
    process = start_python(KILLED, trip.folder.path, files, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, said
    assert len([path for path in trip.stored.rglob("*.pt") if path.is_file()]) == files
    assert trip.record.status == states.FINALIZING

    settle(trip.folder)
    assert trip.record.status == states.COMPLETED, trip.record.failure
    assert trip.texts() == FILES, "nothing twice, and nothing half"
    assert read_json(trip.folder.data)["outputs"][0]["files"] == 2


def test_upload_killed_after_its_last_file_is_not_repeated_and_the_run_completes(
    trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip.come_back()
    with monkeypatch.context() as patch:
        patch.setattr(stage_out_local, "_end", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            settle(trip.folder)
    assert trip.texts() == FILES
    monkeypatch.setattr(upload, "upload_output", None)
    settle(trip.folder)
    assert (trip.record.status, trip.texts()) == (states.COMPLETED, FILES)


def test_existing_files_in_the_datastore_are_not_replaced_and_the_run_fails(trip: Trip) -> None:
    trip.come_back()
    write_tree(trip.stored, {"a.pt": "one"})  # equal content, but not a file of this run
    settle(trip.folder)

    assert trip.record.failure is not None
    assert (trip.record.status, trip.record.exit_code, trip.record.failure.cause) == (states.FAILED, 1, "data")
    assert "1 files are there already at 'm'" in trip.record.failure.message
    assert f"The files that are not stored are in {str(trip.folder.uploads)!r}." in trip.record.failure.message
    assert trip.texts() == {"a.pt": "one"}
    assert (trip.folder.uploads / "model" / "deep" / "b.pt").read_text() == "three"
    assert trip.record.failure.message in trip.folder.driver_log.read_text()


def test_run_whose_datastore_was_unregistered_fails(trip: Trip) -> None:
    trip.come_back()
    trip.lab.unregister()
    settle(trip.folder)
    assert trip.record.failure is not None
    assert "there is no datastore 'lab'" in trip.record.failure.message


def test_outputs_of_a_failed_run_are_stored_and_the_run_keeps_its_failure_report(trip: Trip) -> None:
    report = FailureReport(cause="exception", message="ValueError: bad batch", exit_code=3)
    trip.come_back(states.FAILED, failure=report.to_json(), exit_code=3)
    assert (trip.record.status, trip.record.failure) == (states.FINALIZING, None)
    settle(trip.folder)
    assert (trip.record.status, trip.record.failure, trip.record.exit_code) == (states.FAILED, report, 3)
    assert trip.texts() == FILES


@pytest.mark.parametrize(("status", "left"), [(states.CANCELED, None), (states.FAILED, {})])
def test_ended_remote_run_without_outputs_uploads_nothing(trip: Trip, status: str, left: Any) -> None:
    trip.come_back(status, left)
    assert trip.record.status == status
    assert not settle(trip.folder)
    assert trip.texts() == {}
    assert not trip.folder.home.exists()


def test_run_canceled_before_its_outputs_are_stored_ends_as_canceled_and_stores_none(trip: Trip) -> None:
    trip.come_back()
    write_json(trip.folder.cancel_request, {"by": "ada"})
    settle(trip.folder)
    assert (trip.record.status, trip.record.canceled_by, trip.record.exit_code) == (states.CANCELED, "ada", 143)
    assert trip.texts() == {}
    assert (trip.folder.uploads / "model" / "a.pt").exists()


def test_output_with_a_file_that_came_back_incomplete_is_not_stored_and_fails_the_run(trip: Trip) -> None:
    trip.come_back(left={"model": {"a.pt": 3, "deep/b.pt": 5, "lost.pt": 7}})
    settle(trip.folder)
    assert trip.record.failure is not None
    assert (
        "1 of its 3 files have not come back whole, such as 'lost.pt'; none was stored" in trip.record.failure.message
    )
    assert trip.texts() == {}


def test_partial_files_are_not_uploaded_and_a_run_with_an_empty_output_completes(trip: Trip, tmp_path: Path) -> None:
    trip.come_back()
    (trip.folder.uploads / "model" / ".a.pt.4711").write_text("o")
    settle(trip.folder)
    assert trip.texts() == FILES

    other = Trip(tmp_path / "other")
    other.come_back(left={"model": {}})
    settle(other.folder)
    assert (other.record.status, other.texts()) == (states.COMPLETED, {})


def test_outputs_are_stored_only_by_the_machine_with_the_output_folder(
    trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip.come_back()
    told, here = read_json(trip.folder.home), socket.gethostname()
    write_json(trip.folder.home, {**told, "host": "desk", "folders": {"model": 1}})
    assert settle(trip.folder)
    assert trip.record.status == states.FINALIZING
    assert trip.record.waiting_for == "storing output 'model' waits for a look at the run on desk"
    assert is_over(trip.folder)

    # The record names another host than this one: the host was renamed, or another machine uses the same folder.
    write_json(trip.folder.home, {**told, "host": f"not-{here}"})
    settle(trip.folder)
    assert (trip.record.status, trip.texts()) == (states.COMPLETED, FILES)


def test_only_the_submitting_user_stores_outputs(trip: Trip, monkeypatch: pytest.MonkeyPatch) -> None:
    trip.come_back()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    settle(trip.folder)
    assert trip.record.waiting_for == "storing output 'model' waits for a look at the run by the submitting user"
    monkeypatch.undo()
    settle(trip.folder)
    assert (trip.record.status, trip.record.waiting_for) == (states.COMPLETED, None)


def test_nonempty_output_folder_is_refused_at_submission_unless_overwrite_is_set(tmp_path: Path) -> None:
    write_tree(tmp_path / "store" / "m", {"old.pt": ""})
    with pytest.raises(DataError, match="there are 1 files already"):
        Trip(tmp_path)
    trip = Trip(tmp_path / "two", overwrite=True)
    trip.come_back()
    write_tree(trip.stored, {"a.pt": "older"})
    settle(trip.folder)
    assert trip.texts() == FILES


def test_record_of_a_run_without_local_outputs_is_stored_unchanged(tmp_path: Path) -> None:
    folder, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    expect(folder, ())
    assert not RunFolder(folder.path).home.exists()
    take_record(folder, json.dumps({**store.stored(folder).to_json(), "status": states.COMPLETED}).encode())
    assert store.stored(folder).status == states.COMPLETED
    assert not settle(folder)


@pytest.mark.promise("record-comes-back-cluster-changes")
def test_forged_remote_record_can_change_only_the_outcome_of_the_run(trip: Trip, tmp_path: Path) -> None:
    submitted = trip.record
    job = {**submitted.to_json()["job"], "inputs": [], "notify": ["touch /tmp/forged"]}
    forged = {"job": job, "target": "x", "owner": {"python": "/tmp/x"}, "kind": "sweep", "sweep": {"a": 1}}
    folders = {"scratch_dir": str(tmp_path), "source_directory": "/", "snapshot_id": "../x", "run_id": "../../y"}
    trip.come_back(**forged, **folders, warnings=["seen"])
    assert settle(trip.folder)

    how = {"status": states.COMPLETED, "exit_code": 0, "ended_utc": "2026-01-01T00:00:00.000Z", "warnings": ("seen",)}
    assert trip.record == dataclasses.replace(submitted, **how)
    assert trip.texts() == FILES, "stored where the submitted job says"


@pytest.mark.promise("record-comes-back-cluster-changes")
@pytest.mark.parametrize(
    "values",
    [
        {"status": "Done"},
        {"exit_code": 300},
        {"exit_code": "0"},
        {"ended_utc": "yesterday"},
        {"attempts": [{"number": 1, "started_utc": 3}]},
        {"attempts": [{"number": 1}]},
        {"failure": {"cause": "magic", "message": ""}},
        {"failure": {"cause": "user", "message": ["x"]}},
        {"failure": {"cause": "user", "message": "", "victims": [1]}},
        {"warnings": "text"},
        {"left_out": [{"name": 1}]},
    ],
    ids=str,
)
def test_remote_run_record_with_an_invalid_field_value_is_refused(trip: Trip, values: dict[str, Any]) -> None:
    before = trip.folder.state.read_text()
    with pytest.raises(ReplicaError, match=r"in the run's record|the run's record is not one"):
        trip.come_back(**values)
    assert trip.folder.state.read_text() == before
