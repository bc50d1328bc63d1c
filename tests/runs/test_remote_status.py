from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

import paceline as pl
from paceline.cli.parser import call
from paceline.compat import azureml
from paceline.compat.azureml.exceptions import AzureMLException
from paceline.errors import RunStateError, TargetError
from paceline.runs import read, remote_status, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.record import Attempt, utc_now
from paceline.runs.remote_status import JobStatus
from paceline.system import locks
from paceline.system.files import write_json
from tests.helpers import RUN_ID, make_record, make_run, write_tree


class Engine:
    """An engine with preset answers."""

    def __init__(self):
        self.says = JobStatus(state="running")
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
    monkeypatch.setattr(remote_status, "teller", lambda folder: engine)
    return engine


@pytest.fixture
def folder(tmp_path):
    """Make a run whose supervisor is on another machine: no process here holds its lock."""

    def make(status=states.RUNNING, **values):
        folder, fd = make_run(tmp_path / "ws/runs", RUN_ID, status, **values)
        os.close(fd)
        write_json(folder.engine, {"engine": "slurm", "job_id": "7"})
        return folder

    return make


def gone_for(folder, seconds):
    read.record(folder)
    since = folder.gone.stat().st_mtime - seconds
    os.utime(folder.gone, (since, since))


def test_remote_run_is_alive_while_its_engine_job_is_queued_or_running(engine, folder):
    run = folder()
    assert read.record(run).status == states.RUNNING
    engine.says = JobStatus(state="queued", message="Priority: 3 jobs ahead")
    found = read.record(run)
    assert (found.status, found.waiting_for) == (states.QUEUED, "Priority: 3 jobs ahead")
    assert store.stored(run).status == states.RUNNING  # a reader does not store the new state


@pytest.mark.parametrize(
    "says", [JobStatus(state="unreachable", message="no route"), TargetError("no route")], ids=["look", "error"]
)
def test_unreachable_engine_does_not_fail_its_runs(engine, folder, says):
    run = folder()
    engine.says = says
    found = read.record(run)
    assert (found.status, found.waiting_for, found.is_terminal) == (states.NOT_RESPONDING, "no route", False)


def test_full_disk_while_fetching_files_gives_a_remote_run_the_state_not_responding(engine, folder):
    run = folder()
    engine.says = OSError(28, "No space left on device", "/ws/uploads/model")
    found = read.record(run)
    assert (found.status, found.is_terminal) == (states.NOT_RESPONDING, False)
    assert found.waiting_for == "/ws/uploads/model: No space left on device"


def test_run_with_a_missing_engine_job_is_not_failed_before_a_timeout(engine, folder):
    run = folder()
    engine.says = JobStatus(state="gone", cause="failed", message="gone")
    assert read.record(run).status == states.RUNNING
    store.change(run, store.stored(run), states.COMPLETED, exit_code=0)
    assert read.record(run).status == states.COMPLETED


@pytest.mark.parametrize(
    ("cause", "status", "exit_code"),
    [
        ("cancel", states.CANCELED, 143),
        ("time_limit", states.FAILED, 124),
        ("preempted", states.FAILED, 75),
        ("node_lost", states.FAILED, 1),
    ],
)
def test_run_end_known_only_from_the_engine_job_status_is_recorded_once(engine, folder, cause, status, exit_code):
    run = folder(attempts=(Attempt(number=1, started_utc=utc_now(), nodes=("n1",)),))
    engine.says = JobStatus(state="gone", cause=cause, message="The job was ended.", by="root")
    gone_for(run, 60)
    (run.path / ".incoming").mkdir()
    (run.path / ".incoming" / "0-1").touch()
    store.mark_closing(run)
    found = read.record(run)
    # Regression: parts of files, which a killed supervisor was receiving from nodes, stayed in the run's folder, and so
    # did the mark of a guardian that was killed too.
    assert not (run.path / ".incoming").exists()
    assert not run.closing.exists()
    assert (found.status, found.exit_code) == (status, exit_code)
    assert store.stored(run).to_json() == found.to_json()
    assert found.attempts[-1].cause == cause
    assert (found.canceled_by, found.failure) == ("root", None) if cause == "cancel" else found.failure.cause == cause
    assert not run.gone.exists()
    engine.says = JobStatus(state="running")
    assert read.record(run).status == status


def test_run_whose_supervisor_holds_the_lock_is_not_ended_by_a_wrong_answer_of_the_engine(engine, folder):
    # Regression: readers reported a failed run, and a running one later, when the engine knew its job again.
    run = folder()
    engine.says = JobStatus(state="gone", cause="engine")
    gone_for(run, 60)
    with open(locks.take(run.lock), "rb"):
        assert read.record(run).status == states.RUNNING
    assert read.record(run).status == states.FAILED


def test_run_ended_by_its_engine_has_no_waiting_reason(engine, folder):
    # Regression: after scancel, the record of the canceled run still had the reason for which the run had waited.
    run = folder(states.QUEUED, waiting_for="interrupted by the engine")
    engine.says = JobStatus(state="gone", cause="cancel", by="root")
    gone_for(run, 60)
    assert (read.record(run).status, store.stored(run).waiting_for) == (states.CANCELED, None)


def test_timeout_for_a_missing_engine_job_restarts_when_the_job_reappears(engine, folder):
    run = folder()
    engine.says = JobStatus(state="gone", cause="failed")
    gone_for(run, 60)
    engine.says = JobStatus(state="running")
    assert read.record(run).status == states.RUNNING
    engine.says = JobStatus(state="gone", cause="failed")
    assert read.record(run).status == states.RUNNING


def test_job_canceled_in_the_queue_ends_at_once(engine, folder):
    run = folder(states.NOT_STARTED)
    read.request_cancel(run, "me")
    engine.says = JobStatus(state="gone", cause="cancel", by="uid 1000")
    found = read.record(run)
    assert (found.status, found.canceled_by) == (states.CANCELED, "me")


def test_canceling_a_remote_run_cancels_the_engine_job_and_writes_a_request_to_the_run_folder(engine, folder):
    run = folder()
    read.request_cancel(run, "me")
    assert (engine.canceled, run.cancel_request.exists()) == (1, True)
    assert read.record(run).status == states.CANCEL_REQUESTED


class Far(Engine):
    """An engine whose jobs write in another folder; a look fetches the new lines."""

    def __init__(self, there):
        super().__init__()
        self.there, self.looks, self.later = there, 0, lambda: None
        self.folder: RunFolder | None = None

    def look(self, folder, record):
        self.looks += 1
        shutil.copytree(self.there, folder.path, dirs_exist_ok=True)
        self.later()
        return super().look(folder, record)


#: Way to read a run -> (function that reads it, expected value from the run folder on the cluster). Each function first
#: asks the engine for the current state.
READS = {
    "get_metrics": (lambda run, top: run.get_metrics(), {"loss": 0.5}),
    "get_metrics of a rank": (lambda run, top: run.get_metrics("loss", rank=0), {"loss": 0.5}),
    "get_metrics by rank": (lambda run, top: run.get_metrics(by_rank=True), {"0": {"loss": 0.5}}),
    "get_metrics of children too": (lambda run, top: list(run.get_metrics(recursive=True).values()), [{"loss": 0.5}]),
    "metrics": (lambda run, top: run.metrics("loss").values, (0.5,)),
    "get_file_names": (lambda run, top: run.get_file_names(), ["logs/driver.log", "outputs/a"]),
    "download_file": (
        lambda run, top: (run.download_file("outputs/a", str(top / "copy")), (top / "copy").read_text())[1],
        "1",
    ),
    "download_files": (
        lambda run, top: (run.download_files("outputs/", str(top)), [str(top / "outputs/a")])[1],
        ["TOP/outputs/a"],
    ),
    "get_all_logs": (lambda run, top: [Path(path).read_text() for path in run.get_all_logs(top)], ["line\n"]),
    "get_details": (lambda run, top: [*run.get_details()["logFiles"]], ["logs/driver.log"]),
    "get_details_with_logs": (lambda run, top: run.get_details_with_logs()["logFiles"], {"logs/driver.log": "line\n"}),
    "pace": (lambda run, top: run.pace().seconds, 61.5),
    "resources": (lambda run, top: run.resources()["ranks"][0]["memory_gib"].values, (2.5,)),
    "goodput": (lambda run, top: run.goodput().seconds > 0, True),
    "tags": (lambda run, top: run.tags, {"phase": "late"}),
    "get_tags": (lambda run, top: run.get_tags(), {"phase": "late"}),
    "properties": (lambda run, top: run.properties, {"seed": "3"}),
    "get_properties": (lambda run, top: run.get_properties(), {"seed": "3"}),
    "display_name": (lambda run, top: run.display_name, "mine"),
    "name": (lambda run, top: run.name, "mine"),
    "is_archived": (lambda run, top: run.is_archived, False),
    "description": (lambda run, top: run.description, "of the script's"),
    "comments": (lambda run, top: [comment.text for comment in run.comments], ["diverges"]),
    "input_datasets": (lambda run, top: list(run.input_datasets), ["train"]),
    "output_datasets": (lambda run, top: list(run.output_datasets), ["model"]),
    "get_environment": (lambda run, top: run.get_environment().name, "default-environment"),
    "register_model": (
        lambda run, top: [file.name for file in run.register_model("m", "outputs/a").record.files],
        ["a"],
    ),
    # These calls read the existing values before they write.
    "add_properties": (lambda run, top: refused(lambda: run.add_properties({"seed": 4})), "AzureMLException"),
    "upload_file": (lambda run, top: refused(lambda: run.upload_file("outputs/a", __file__)), "AzureMLException"),
    "upload_files": (lambda run, top: refused(lambda: run.upload_files(["outputs/a"], [__file__])), "AzureMLException"),
    "upload_folder": (lambda run, top: refused(lambda: run.upload_folder("outputs", other_a(top))), "AzureMLException"),
    # These calls return the state that the engine reports.
    "status": (lambda run, top: run.status, states.RUNNING),
    "get_status": (lambda run, top: run.get_status(), states.RUNNING),
    "get_detailed_status": (lambda run, top: run.get_detailed_status()["status"], states.RUNNING),
    "record": (lambda run, top: run.record().status, states.RUNNING),
    "failure": (lambda run, top: run.failure, None),
}
#: Other attributes of a handle: values that are fixed at submission, calls that only write or that make other runs, and
#: `wait_for_completion`, which has a test of its own.
NO_READS = {
    *(
        "experiment",
        "folder",
        "id",
        "kind",
        "kinds",
        "type",
        "number",
        "parent",
        "get_children",
        "get_portal_url",
        "get_snapshot_id",
    ),
    *("restore_snapshot", "get", "list", "get_context", "make_experiment", "open_dataset", "offline_class"),
    # These calls show values that other calls read.
    *("show", "plot"),
    # These calls send requests to the nodes of the run.
    *("stacks", "profile"),
    *("models", "make_model", "models_of"),
    *("log", "log_accuracy_table", "log_confusion_matrix", "log_image", "log_list", "log_predictions", "log_residuals"),
    *(
        "log_row",
        "log_table",
        "flush",
        "tag",
        "set_tags",
        "remove_tags",
        "start",
        "complete",
        "fail",
        "cancel",
        "delete",
        "comment",
        "remove_comment",
    ),
    *("clean", "get_secret", "get_secrets", "get_submitted_run", "take_snapshot"),
    *("child_run", "create_children", "submit_child", "exec", "wait_for_completion"),
}


def refused(call):
    with pytest.raises((RunStateError, AzureMLException)) as error:
        call()
    return type(error.value).__name__


def other_a(top):
    return write_tree(top / "other", {"a": "2"})


@pytest.fixture
def far(monkeypatch, folder, tmp_path):
    """A handle on a run that writes in another folder, and its engine: `engine.folder` is what there is by now."""
    run = folder()
    engine = Far(tmp_path / "there")
    monkeypatch.setattr(remote_status, "teller", lambda folder: engine)
    write_json(run.engine, {"engine": "slurm", "job_id": "7", "mirrored": True})
    there = engine.folder = RunFolder(write_tree(tmp_path / "there", {"outputs/a": "1", "logs/driver.log": "line\n"}))
    there.metrics.mkdir()
    MetricLog(there.metric_log(0, 1), attempt=1).scalar("loss", 0.5, None)
    tags_and_properties.set_tags(there.notes, {"phase": "late"})
    tags_and_properties.add_properties(there.notes, {"seed": 3})
    tags_and_properties.set_name(there.notes, "display_name", "mine")
    tags_and_properties.set_name(there.notes, "description", "of the script's")
    tags_and_properties.add_comment(there.notes, "diverges")
    write_json(
        there.data,
        {"inputs": [{"name": "train", "node_rank": 0, "sources": []}], "outputs": [{"name": "model", "sources": []}]},
    )
    write_json(there.environment, {"key": "0123"})
    MetricLog(there.load_log(0)).scalar("rank_memory_gib", 2.5, 1700000000)
    there.attempt(1).mkdir(parents=True, exist_ok=True)
    write_json(there.load(1), {"nodes": {}, "ranks": {}, "pace": {"ranks": {}, "straggler": None, "seconds": 61.5}})
    # This handle also has the names of the Azure SDK, which read the same values as Paceline's own names.
    handle = azureml.Run(azureml.Experiment(pl.Workspace(tmp_path / "ws"), make_record().experiment), run.run_id)
    return handle, engine


@pytest.mark.promise("call-reads-run-brings-here")
@pytest.mark.parametrize("read", READS)
def test_each_sdk_call_that_reads_a_remote_run_fetches_its_new_data_first(far, tmp_path, read):
    handle, engine = far
    call, expected = READS[read]
    found = call(handle, tmp_path / "copies")

    assert str(found).replace(str(tmp_path / "copies"), "TOP") == str(expected)
    looks = engine.looks
    assert looks in range(1, 5), "targets keep their answers for a second or more"
    store.change(handle.folder, store.stored(handle.folder), states.COMPLETED, exit_code=0)
    if expected != states.RUNNING:
        call(handle, tmp_path / "copies2")
    assert engine.looks == looks, "its end comes last: all is here"


def test_removing_a_comment_that_was_written_on_another_machine_fetches_the_comment_first(far):
    handle, engine = far
    (comment_id,) = tags_and_properties.read(engine.folder.notes).comments
    handle.remove_comment(comment_id)
    assert engine.looks == 1
    assert not tags_and_properties.read(handle.folder.notes).comments


@pytest.mark.promise("call-reads-run-brings-here")
def test_each_public_attribute_of_the_sdk_run_is_declared_as_reading_run_data_or_not():
    """So that who adds one has to say which it is, and a read is tried above."""
    assert {name for name in dir(azureml.Run) if name[0] != "_"} == {name.split()[0] for name in READS} | NO_READS
    assert issubclass(azureml.Run, pl.Run)


@pytest.mark.parametrize("show_output", [False, True])
def test_wait_for_completion_of_a_remote_run_returns_after_its_end_and_files_were_fetched(far, capsys, show_output):
    handle, engine = far
    there, record = engine.folder, store.stored(handle.folder)
    log = there.rank_log(1, 0).relative_to(there.path).as_posix()
    write_tree(there.path, {log: "from afar\n", "outputs/model.pt": "weights"})
    attempt = Attempt(number=1, started_utc=utc_now(), nodes=("n1",), exit_codes={"0": 0})
    ended = dataclasses.replace(
        record, status=states.COMPLETED, exit_code=0, started_utc=utc_now(), ended_utc=utc_now(), attempts=(attempt,)
    )
    # At the first query, the engine reports no end, so only files are fetched. At a later query, it reports the end.
    engine.later = lambda: write_json(there.state, ended.state_json())

    assert handle.wait_for_completion(show_output=show_output)["status"] == states.COMPLETED
    assert engine.looks > 1
    assert ("from afar\n" in capsys.readouterr().out) == show_output
    assert (handle.folder.outputs / "model.pt").read_text() == "weights"


#: Command that reads a run -> its output, with values from the run folder on the cluster.
COMMANDS = {
    "metrics RUN": "loss",
    "metrics --name loss RUN": "0.5",
    "files RUN": "outputs/a",
    "download RUN outputs/a": "1 file",
    "logs --driver RUN": "line",
    "show RUN": "phase=late",
    "show --json RUN": '"outputs/a"',
    "status --json RUN": '"phase": "late"',
    "list --long": "phase=late",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_that_reads_a_remote_run_fetches_its_new_data_first(far, capfd, monkeypatch, tmp_path, command):
    handle, engine = far
    monkeypatch.setenv("PACELINE_WORKSPACE", str(tmp_path / "ws"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["paceline", *command.replace("RUN", handle.id).split()])
    assert not call()
    expected = COMMANDS[command]
    assert expected in capfd.readouterr().out
    assert engine.looks


def test_reading_a_run_whose_engine_is_unreachable_returns_the_local_data(engine, folder, tmp_path):
    run = folder()
    write_json(run.engine, {"engine": "slurm", "job_id": "7", "mirrored": True})
    engine.says = TargetError("no route")
    # This handle also has the names of the Azure SDK, which read the same values as Paceline's own names.
    handle = azureml.Run(azureml.Experiment(pl.Workspace(tmp_path / "ws"), make_record().experiment), run.run_id)
    assert (handle.get_metrics(), handle.get_file_names()) == ({}, [])


def test_reading_a_local_run_sends_no_request_to_an_engine(monkeypatch, folder, tmp_path):
    run = folder()
    monkeypatch.setattr(remote_status, "teller", None)
    # This handle also has the names of the Azure SDK, which read the same values as Paceline's own names.
    handle = azureml.Run(azureml.Experiment(pl.Workspace(tmp_path / "ws"), make_record().experiment), run.run_id)
    assert (handle.get_metrics(), handle.get_file_names(), handle.tags) == ({}, [], {})
    write_json(run.engine, {"engine": "slurm", "job_id": "7", "mirrored": True})
    monkeypatch.setenv("PACELINE_RUN_ID", run.run_id)
    assert handle.get_metrics() == {}, "nor by the run's own processes"
