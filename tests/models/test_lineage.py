"""What a model knows of the run that made it, by real runs of this machine."""

from __future__ import annotations

import os
import sys

import pytest

import paceline as pl
from paceline.errors import ModelError
from paceline.job.environment import EnvironmentSpec
from paceline.models import lineage
from paceline.models.lineage import of_run
from paceline.runs import states, store
from paceline.runs.context import WorkerContext
from paceline.system.files import write_json
from tests.helpers import make_job, make_run, write_tree

SCRIPT = """
import os, sys
from paceline import Run
run = Run.get_context()
os.makedirs("outputs/model")
with open("outputs/model/weights", "w") as file:
    file.write("1")
run.log("accuracy", 0.5)
if "register" in sys.argv:
    print("made", run.register_model("inside", "outputs/model").id)
"""


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """(workspace, a run of this machine that has ended): it has registered a model itself."""
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    workspace = pl.Workspace(tmp_path / "ws")
    write_tree(tmp_path / "source", {"train.py": SCRIPT})
    estimator = pl.Estimator(
        source_directory=str(tmp_path / "source"), entry_script="train.py", arguments=["--epochs", 3, "register"]
    )
    run = pl.Experiment(workspace, "digits").submit(estimator)
    run.wait_for_completion()
    return workspace, run


@pytest.mark.promise("model-says-run-snapshot-packages")
def test_model_registered_during_or_after_a_run_records_status_arguments_and_metrics_of_the_run(finished):
    workspace, run = finished
    inside = pl.Model(workspace, "inside")
    after = run.register_model("after", "outputs/model")
    assert inside.run_id == after.run_id == run.id
    assert inside.record.digest == after.record.digest
    for model, status, seen in ((inside, "Running", "in the run"), (after, "Completed", "at registration")):
        told = model.record.run
        assert (told["status"], told["environment"]["seen"]) == (status, seen)
        assert told["snapshot_id"] == run.record().snapshot_id
        assert (told["entry"], told["arguments"]) == (["train.py"], ["--epochs", "3", "register"])
        assert told["topology"]["world_size"] == 1
        assert told["topology"]["target"] == "local"
        assert told["environment"]["python"] == sys.executable
        assert any(package.startswith("pytest==") for package in told["environment"]["packages"])
        assert told["metrics"]["accuracy"]["last"] == 0.5
    assert [model.id for model in run.models] == ["after:1", "inside:1"]


@pytest.mark.promise("model-says-run-snapshot-packages")
def test_lineage_has_dataset_fingerprints_and_node_count(tmp_path):
    folder, fd = make_run(
        tmp_path / "ws/runs", status=states.RUNNING, job=make_job(node_count=2, distributed_backend="gloo")
    )
    write_tree(folder.path, {"outputs/m": "1"})
    told = {
        "name": "train",
        "dataset": "digits:3",
        "content": "0a1b",
        "sources": [],
        "path": "/x",
        "files": 2,
        "bytes": 9,
    }
    write_json(folder.data, {"inputs": [{**told, "node_rank": 0}, {**told, "node_rank": 1, "files": 1}]})
    write_json(
        folder.environment,
        {"key": "k", "python": "/gone/python", "locked": {"locked_pip": ["a==1"]}, "pip": ["a==1"], "conda": []},
    )
    run = pl.Workspace(tmp_path / "ws").get_run(folder.run_id)
    record = run.register_model("m", "outputs/m", datasets=[("validation", "digits-test")]).record
    os.close(fd)
    assert record.run["datasets"] == [
        {"name": "train", "dataset": "digits:3", "content": "0a1b", "files": 2, "bytes": 9}
    ]
    assert record.datasets == ({"purpose": "validation", "dataset": "digits-test", "fingerprint": None},)
    assert record.run["environment"]["locked"] == {"locked_pip": ["a==1"]}
    assert record.run["environment"]["pip"] == ["a==1"]
    assert "packages" not in record.run["environment"], "that interpreter is gone"
    assert record.run["topology"]["node_count"] == 2


@pytest.mark.parametrize("where", ["on a node that has a copy of the folder", "in a container, which has the folder"])
def test_register_model_is_refused_in_a_container_and_on_a_node_that_has_a_copy_of_the_run_folder(
    tmp_path, monkeypatch, where
):
    job = make_job(environment=EnvironmentSpec(docker_image="python:3.11")) if "container" in where else make_job()
    folder, fd = make_run(tmp_path / "ws/runs", status=states.RUNNING, job=job)
    os.close(fd)
    write_tree(folder.path, {"outputs/m": "1"})
    if "copy" in where:
        folder.lock.unlink()  # a copy of the folder on a node has no lock file
    for name, value in {"RUN_DIR": folder.path, "RUN_ID": folder.run_id, "ATTEMPT": 1}.items():
        monkeypatch.setenv(f"PACELINE_{name}", str(value))
    monkeypatch.setenv("PACELINE_RANK", "0")
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "1")
    assert WorkerContext.from_environment() is not None
    with pytest.raises(ModelError, match=rf"is {where} of run .* model register NAME PATH --run {folder.run_id}"):
        pl.Run.get_context().register_model("m", "outputs/m")
    assert not (tmp_path / "ws/models").exists()


def test_lineage_of_a_model_registered_inside_a_starting_run_has_status_running(tmp_path, monkeypatch):
    folder, fd = make_run(tmp_path / "ws/runs", status=states.STARTING)
    os.close(fd)
    record = store.stored(folder)
    assert of_run(folder, record)["status"] == "Starting"
    monkeypatch.setenv("PACELINE_RUN_ID", folder.run_id)
    assert of_run(folder, record)["status"] == "Running"


def test_register_model_outside_a_run_only_prints_a_message(capsys):
    pl.Run.get_context().register_model("digits", "outputs/model", tags={"a": 1})
    assert capsys.readouterr().out == "Attempted to register model digits\n"


def test_lineage_lists_the_packages_of_another_interpreter_and_none_if_it_fails(tmp_path):
    found = lineage.ask(sys.executable, {"PACELINE_ASKED": "1"})
    assert found["packages"] == lineage.installed_here()["packages"]
    assert lineage.ask(str(tmp_path / "gone"), {}) == {}
    write_tree(tmp_path, {"fails": "#!/bin/sh\nexit 3\n"})
    (tmp_path / "fails").chmod(0o755)
    assert lineage.ask(str(tmp_path / "fails"), {}) == {}
