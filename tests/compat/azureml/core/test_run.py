"""Runs with the SDK's spellings."""

from __future__ import annotations

import json
import os

import pytest

from paceline.compat.azureml.core.experiment import Experiment, Run
from paceline.compat.azureml.core.run import OfflineRun
from paceline.compat.azureml.exceptions import AzureMLException, UserErrorException
from paceline.errors import MetricError
from paceline.runs import page_address, states, store
from paceline.runs.failure import FailureReport
from paceline.workspace import Workspace
from tests.helpers import RUN_ID, make_run, run_python, write_tree


@pytest.fixture
def experiment():
    return Experiment(Workspace("ws"), "digits")


@pytest.fixture
def submitted(experiment):
    """A run with a supervisor, as far as anybody can see: this process."""
    folder, fd = make_run(
        experiment.runs_dir, status=states.RUNNING, target="local", submitted_by="me", snapshot_id="5" * 64
    )
    yield Run(experiment, folder.run_id)
    os.close(fd)


@pytest.fixture
def run(experiment):
    with experiment.start_logging() as run:
        yield run


def test_script_that_imports_only_azureml_core_run_gets_its_run_from_get_context(submitted):
    worker = {"PACELINE_RUN_DIR": str(submitted.folder.path), "PACELINE_ATTEMPT": "1"}
    worker |= {"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1"}
    code = (
        "import paceline.azureml; from azureml.core.run import Run; run = Run.get_context(); run.log('loss', 0.5)\n"
        "print(run.experiment.workspace.get_default_datastore().name)"
    )
    assert run_python(code, environment=worker) == "workspaceblobstore\n"
    assert submitted.get_metrics() == {"loss": 0.5}


def end(run: Run, status: str, **changes: object) -> None:
    store.change(run.folder, store.stored(run.folder), status, **changes)


def test_run_details_have_the_sdks_keys_and_values(submitted):
    submitted.add_properties({"mine": "1"})
    details = submitted.get_details()
    assert list(details) == [
        *("runId", "target", "status", "startTimeUtc", "endTimeUtc", "properties", "inputDatasets", "outputDatasets"),
        *("runDefinition", "logFiles", "submittedBy"),
    ]
    assert (details["runId"], details["target"], details["status"]) == (RUN_ID, "local", "Running")
    assert details["properties"] == {"mine": "1", "ContentSnapshotId": "5" * 64}
    definition = details["runDefinition"]
    assert (definition["script"], definition["arguments"], definition["target"]) == ("train.py", [], "local")
    assert (definition["framework"], definition["communicator"], definition["nodeCount"]) == ("Python", "None", 1)


def test_git_state_is_in_the_run_properties(experiment):
    folder, fd = make_run(experiment.runs_dir, git={"commit": "abc", "dirty": True})
    properties = Run(experiment, folder.run_id).get_details()["properties"]
    assert properties == {"azureml.git.commit": "abc", "azureml.git.dirty": True}
    os.close(fd)


def test_details_of_a_failed_run_have_the_reason(submitted):
    report = FailureReport(cause="exception", message="bad batch")
    end(submitted, states.FAILED, failure=report)
    details = submitted.get_details()
    assert details["error"] == {"error": {"code": "exception", "message": "bad batch"}}
    assert details["warnings"] == []
    assert submitted.failure == report
    assert submitted.get_detailed_status() == {"status": "Failed", "details": "bad batch"}


def test_get_detailed_status_contains_the_reason_why_a_run_waits(experiment):
    folder, fd = make_run(experiment.runs_dir, waiting_for="waits for 1 run (a)")
    assert Run(experiment, folder.run_id).get_detailed_status()["details"] == "waits for 1 run (a)"
    os.close(fd)


def test_get_details_with_logs_returns_the_last_mib_of_each_log(submitted):
    write_tree(submitted.folder.logs, {"rank_0.log": b"step 1\n\xff\n", "driver.log": "x" * 2_000_000})
    assert set(submitted.get_details()["logFiles"]) == {"logs/rank_0.log", "logs/driver.log"}
    logs = submitted.get_details_with_logs()["logFiles"]
    assert logs["logs/rank_0.log"] == "step 1\n\ufffd\n"
    assert len(logs["logs/driver.log"]) == 1 << 20


def test_portal_url_is_the_page_of_the_running_web_server_or_otherwise_the_url_of_the_run_folder(submitted):
    experiment, workspace_dir = submitted.experiment, submitted.folder.path.parents[1]
    assert submitted.get_portal_url() == submitted.folder.path.as_uri()
    (workspace_dir / "ui").mkdir()
    held = page_address.announce(workspace_dir, "http://127.0.0.1:7223")
    assert submitted.get_portal_url() == f"http://127.0.0.1:7223/runs/{submitted.id}"
    assert experiment.get_portal_url() == "http://127.0.0.1:7223/?experiment=digits"
    assert page_address.announce(workspace_dir, "http://127.0.0.1:7224") is None
    os.close(held)
    assert submitted.get_portal_url() == submitted.folder.path.as_uri()


@pytest.mark.parametrize("kind", ["confusion_matrix", "accuracy_table", "residuals", "predictions"])
def test_chart_metrics_accept_a_dict_or_its_json(run, kind):
    value = {"schema_type": kind, "data": {"matrix": [[1, 2]]}}
    getattr(run, f"log_{kind}")("m", value)
    assert run.get_metrics() == {"m": value}
    getattr(run, f"log_{kind}")("m", json.dumps(value))
    assert run.get_metrics() == {"m": [value, value]}


@pytest.mark.parametrize(
    "value", ["{", "[1]", [1], object(), 5], ids=["text", "list in text", "list", "object", "number"]
)
def test_log_confusion_matrix_refuses_a_value_that_is_no_dict_or_json(run, value):
    with pytest.raises(MetricError, match="'m'"):
        run.log_confusion_matrix("m", value)


def test_get_status_get_tags_and_get_properties_return_the_same_as_the_attributes_of_a_run(submitted):
    submitted.tag("lr", 0.1)
    submitted.add_properties({"commit": "abc"})
    submitted.flush()
    assert (submitted.get_status(), submitted.type) == (submitted.status, "azureml.scriptrun")
    assert submitted.get_tags() == submitted.tags == {"lr": "0.1"}
    assert submitted.get_properties() == submitted.properties == {"commit": "abc"}
    assert submitted.get_snapshot_id() == "5" * 64


def test_wait_for_completion_returns_the_run_details(submitted):
    end(submitted, states.COMPLETED)
    assert submitted.wait_for_completion(wait_post_processing=True) == submitted.get_details()
    assert submitted.wait_for_completion(False, False, True)["status"] == "Completed"


def test_parent_child_and_listed_runs_are_instances_of_the_run_class_of_the_sdk(experiment):
    with experiment.start_logging() as parent, parent.child_run() as child:
        assert [type(one) for one in (parent, child, child.parent, *parent.get_children(type="interactive"))] == [
            Run
        ] * 4
        assert [type(one) for one in experiment.get_runs(type="interactive")] == [Run]
        assert list(Run.list(experiment, include_children=True)) == [child, parent]
        assert list(Run.list(experiment, type="script")) == []
        found = Run.get(experiment.workspace, parent.id)
        assert (found, type(found), type(found.experiment)) == (parent, Run, Experiment)


def test_offline_run_has_children_tags_and_metrics(monkeypatch, capsys):
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    run = Run.get_context()
    assert type(run) is OfflineRun
    # Scripts check for this attribute to find out whether they are in a run.
    assert [hasattr(one, "experiment") for one in (run, run.child_run("a"))] == [False, False]
    with run.child_run("child") as child:
        child.tag("lr", 1)
        child.log_residuals("r", {"data": 1})
        child.flush()
    assert (child.get_tags(), child.get_properties(), child.get_status()) == ({"lr": "1"}, {}, "Running")
    assert "Attempted to log residuals metric r" in capsys.readouterr().out


def test_second_upload_with_other_content_under_one_name_is_refused(run, tmp_path):
    file = tmp_path / "x.txt"
    for text in ("one", "one"):
        file.write_text(text)
        run.upload_file("x.txt", str(file))
    file.write_text("two")
    with pytest.raises(AzureMLException, match=r"another file 'x\.txt' already"):
        run.upload_file("x.txt", str(file))


def test_invalid_experiment_name_is_refused_and_offline_child_has_an_id(ws):
    with pytest.raises(UserErrorException, match="bad name"):
        Experiment(ws, "bad name!")
    outside = Run.get_context()
    assert outside.child_run("part").id == f"{outside.id}.part"


def test_a_file_can_be_downloaded_to_a_path_object(run, tmp_path):
    (tmp_path / "plot.png").write_bytes(b"png")
    run.upload_file("plot.png", tmp_path / "plot.png")
    (tmp_path / "folder").mkdir()
    run.download_file("plot.png", tmp_path / "copy.png")
    run.download_file("plot.png", tmp_path / "folder")
    assert (tmp_path / "copy.png").read_bytes() == (tmp_path / "folder" / "plot.png").read_bytes() == b"png"


def test_experiment_tag_without_a_name_is_refused(experiment):
    experiment.set_tags({"team": "vision", "bare": None, "year": 2026})
    for wrong in ("", 3):
        with pytest.raises(UserErrorException, match="is not a non-empty string"):
            experiment.tag(wrong, "value")
    assert experiment.tags == {"team": "vision", "bare": None, "year": "2026"}


def test_restored_snapshot_is_not_written_through_a_link_of_another_user(submitted, tmp_path):
    # The name /tmp/<snapshot id>.zip is predictable, so another user could create a link of that name.
    source = write_tree(tmp_path / "source", {"train.py": "x"})
    submitted.folder.snapshot.symlink_to(source)
    victim, place = tmp_path / "victim", tmp_path / "place"
    victim.write_text("mine")
    place.mkdir()
    (place / f"{'5' * 64}.zip").symlink_to(victim)
    restored = submitted.restore_snapshot(path=str(place))
    assert victim.read_text() == "mine"
    assert not os.path.islink(restored)
    assert os.listdir(place) == [os.path.basename(restored)]
