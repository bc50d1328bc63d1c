"""Packages beside the core: widgets, telemetry, logins, public data, collected data, TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compat.azureml.core.authentication import ServicePrincipalAuthentication
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.monitoring import ModelDataCollector
from paceline.compat.azureml.opendatasets import MNIST, Diabetes
from paceline.compat.azureml.telemetry import set_diagnostics_collection
from paceline.compat.azureml.tensorboard import Tensorboard, export_to_tensorboard
from paceline.compat.azureml.widgets import RunDetails
from paceline.trackers.event_file import EventFile


def test_widget_shows_a_run_without_waiting_for_it(ws, capsys):
    run = Experiment(ws, "e").start_logging(snapshot_directory=None, outputs=False)
    run.log("loss", 1)
    RunDetails(run).show()
    assert run.id in capsys.readouterr().out
    assert RunDetails(run).get_widget_data()["run_metrics"] == {"loss": 1}
    run.complete()


def test_telemetry_and_login_classes_accept_any_argument_and_store_no_password():
    set_diagnostics_collection(send_diagnostics=True, verbosity="INFO")
    login = ServicePrincipalAuthentication("tenant", "id", service_principal_password="pa55")
    assert login.get_authentication_header() == {}
    assert "pa55" not in str(vars(login))


def test_data_collector_writes_a_csv_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    collector = ModelDataCollector("best/model", designation="inputs", feature_names=["a", "b"])
    collector.collect([[1, 2], [3, 4]])
    collector.collect([5, 6], "mine")
    lines = Path("modeldata/best_model/inputs.csv").read_text().splitlines()
    assert lines[0] == "$aml_time,$aml_id,a,b"
    assert [line.split(",")[2:] for line in lines[1:]] == [["1", "2"], ["3", "4"], ["5", "6"]]
    assert lines[3].split(",")[1] == "mine"


def test_public_diabetes_dataset_is_loaded_from_scikit_learn_and_public_mnist_dataset_is_refused():
    pytest.importorskip("sklearn")
    pytest.importorskip("pandas")
    frame = Diabetes.get_tabular_dataset().to_pandas_dataframe()
    assert list(frame.columns) == ["AGE", "SEX", "BMI", "BP", "S1", "S2", "S3", "S4", "S5", "S6", "Y"]
    assert len(frame) == 442
    with pytest.raises(UserErrorException, match=r"Dataset\.File\.from_files"):
        MNIST.get_file_dataset()


def test_start_of_tensorboard_without_its_package_raises_with_the_install_command(ws, monkeypatch, tmp_path):
    run = Experiment(ws, "e").start_logging(snapshot_directory=None, outputs=False)
    run.complete()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    board = Tensorboard([run])
    with pytest.raises(UserErrorException, match="pip install tensorboard"):
        board.start()
    board.stop()


def test_metrics_are_written_for_tensorboard_by_step(ws, tmp_path):
    pytest.importorskip("tensorboard")
    with Experiment(ws, "e").start_logging(snapshot_directory=None, outputs=False) as run:
        run.log("loss", 0.5, step=10)
        run.log("loss", 0.25, step=20)
        run.log("name", "text")
    export_to_tensorboard(run, str(tmp_path / "logs"))
    (file,) = (tmp_path / "logs" / run.id).iterdir()
    assert [(one.tag, one.step, one.value) for one in EventFile(file).new()] == [("loss", 10, 0.5), ("loss", 20, 0.25)]
