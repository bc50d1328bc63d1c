"""A version in an MLflow registry, by mlflow's own client and a store in a file."""

from __future__ import annotations

import gc
import importlib.util
import logging
import shutil
from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import ModelChangedError, ModelError, TransferError
from paceline.models import mlflow_registry
from tests.helpers import write_tree

needs_mlflow = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mlflow", "sqlalchemy", "alembic"))),
    reason="mlflow-skinny with sqlalchemy and alembic, for its store in a file, is not installed",
)
# Imports of mlflow cause warnings that Paceline can't avoid.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def workspace(tmp_path):
    return pl.Workspace(tmp_path / "ws")


@pytest.fixture
def model(workspace, tmp_path):
    with pl.Experiment(workspace, "training").start_logging() as run:
        run.log("accuracy", 0.5)
        run.log("accuracy", 0.75, step=3)
        run.log("nan", float("nan"))
        write_tree(run.folder.outputs, {"model/weights": "w" * 1000, "model/sub/config": "{}"})
        return run.register_model(
            "digits", "outputs/model", tags={"a": 1}, properties={"b": 2}, description="what it is"
        )


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """An empty database: MLflow makes one in the fifty steps of its history, each written to the disk."""
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).search_registered_models()
    return folder / "mlflow.db"


@pytest.fixture
def uri(made_once, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MLflow stores artifacts beside its database
    shutil.copy(made_once, tmp_path)
    yield f"sqlite:///{tmp_path / 'mlflow.db'}"
    # MLflow keeps connections open until the process ends, and Python would warn about unclosed connections.
    for one in gc.get_objects():
        if type(one).__module__ == "sqlalchemy.engine.base" and type(one).__name__ == "Engine":
            one.dispose()


@pytest.mark.promise("version-goes-mlflow-registry-files")
@needs_mlflow
def test_push_to_mlflow_copies_files_metrics_tags_and_aliases(workspace, model, uri, tmp_path):
    import mlflow

    model.set_alias("production")
    pushed = mlflow_registry.push(workspace.path, model.record, uri)
    assert (pushed.name, pushed.version, pushed.is_new) == ("digits", 1, True)
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    there = client.get_model_version_by_alias("digits", "production")
    assert (int(there.version), there.description) == (1, "what it is")
    assert {
        "paceline.model": "digits:1",
        "paceline.run_id": model.run_id,
        "a": "1",
        "b": "2",
    }.items() <= there.tags.items()
    run = client.get_run(there.run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"accuracy": 0.75})
    assert client.get_experiment(run.info.experiment_id).name == "training"
    copy = Path(client.download_artifacts(there.run_id, "model", str(tmp_path)))
    assert (copy / "model/weights").read_text() == "w" * 1000

    again = mlflow_registry.push(workspace.path, model.record, uri)
    assert (again.version, again.is_new) == (1, False)
    second = pl.Model.register(workspace, model.artifact, "digits")
    assert second.push_to_mlflow(uri) == 2


@needs_mlflow
def test_interrupted_push_to_mlflow_leaves_no_version_and_can_be_repeated(workspace, model, uri, monkeypatch):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_artifacts", lambda *given, **values: None)
        with pytest.raises(TransferError, match=r"of model digits:1 is not whole in MLflow's artifacts\. Push again\."):
            mlflow_registry.push(workspace.path, model.record, uri)
    assert list(client.search_model_versions("name='digits'")) == []
    assert mlflow_registry.push(workspace.path, model.record, uri).version == 1


@needs_mlflow
def test_push_to_an_invalid_mlflow_registry_raises_a_transfer_error(workspace, model):
    with pytest.raises(TransferError, match=r"MLflow at nix://nowhere did not take digits:1: "):
        mlflow_registry.push(workspace.path, model.record, "nix://nowhere")


@needs_mlflow
def test_model_changed_on_disk_is_not_pushed_to_mlflow(workspace, model, uri):
    path = model.artifact / "weights"
    path.chmod(0o644)
    path.write_text("spoilt")
    with pytest.raises(ModelChangedError, match="have changed since its registration"):
        mlflow_registry.push(workspace.path, model.record, uri)


def test_missing_mlflow_package_is_named_in_the_error(workspace, model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"mlflow-skinny, which is missing: pip install 'paceline\[mlflow\]'"):
        mlflow_registry.push(workspace.path, model.record, "sqlite:///x.db")
