from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.model import InferenceConfig, Model
from paceline.compat.azureml.exceptions import ModelNotFoundException, ModelPathNotFoundException, WebserviceException


def test_model_is_registered_found_by_version_and_tag_and_downloaded(ws, capsys):
    Path("m.pkl").write_text("1")
    made = Model.register(model_path="m.pkl", model_name="digits", tags={"area": "d"}, workspace=ws)
    assert "Registering model digits" in capsys.readouterr().out
    assert (made.name, made.version, made.id, made.url) == ("digits", 1, "digits:1", "aml://asset/digits:1")
    Path("m.pkl").write_text("2")
    assert Model.register(ws, "m.pkl", "digits").version == 2
    assert Model(ws, "digits").version == 2
    assert Model(ws, name="digits", version=1).tags == {"area": "d"}
    assert Model(ws, "digits", tags={"area": "d"}).version == 1
    assert [one.version for one in Model.list(ws, name="digits")] == [2, 1]
    assert ws.models["digits"].version == 2
    assert Path(made.download(target_dir="got")).read_text() == "1"
    with pytest.raises(WebserviceException, match="exist"):
        made.download(target_dir="got")
    made.download(target_dir="got", exist_ok=True)
    with pytest.raises(WebserviceException, match="ModelNotFound"):
        Model(ws, "nothing")
    with pytest.raises(WebserviceException):
        Model.register(ws, "m.pkl", "no good")


def test_run_registers_a_model_from_a_path_in_its_outputs(ws):
    with Experiment(ws, "e").start_logging(snapshot_directory=None) as run:
        Path("outputs/model.txt").write_text("weights")
    made = run.register_model(model_name="digits", model_path="./outputs/model.txt", tags={"k": "v"})
    assert (made.run_id, made.experiment_name, made.tags) == (run.id, "e", {"k": "v"})
    with pytest.raises(ModelPathNotFoundException, match=r"outputs/model\.txt"):
        run.register_model("digits", "outputs/nothing.txt")


def test_model_path_is_searched_in_the_service_and_working_folders(ws, monkeypatch):
    Path("azureml-models/digits/3").mkdir(parents=True)
    Path("azureml-models/digits/3/m.pkl").write_text("1")
    assert Model.get_model_path("digits") == "azureml-models/digits/3/m.pkl"
    Path("plain.pkl").write_text("1")
    assert Model.get_model_path(model_name="plain.pkl") == "plain.pkl"
    with pytest.raises(ModelNotFoundException):
        Model.get_model_path("nothing")
    Path("served").mkdir()
    Path("served/m.pkl").write_text("1")
    monkeypatch.setenv("AZUREML_MODEL_DIR", "served")
    assert Model.get_model_path("digits") == "served/m.pkl"
    monkeypatch.delenv("AZUREML_MODEL_DIR")
    Path("reg.pkl").write_text("1")
    Model.register(ws, "reg.pkl", "reg")
    assert Path(Model.get_model_path("reg", _workspace=ws)).read_text() == "1"


def test_inference_config_refuses_an_entry_script_that_is_missing_or_not_a_python_file(ws):
    with pytest.raises(WebserviceException, match=r"score\.py"):
        InferenceConfig(entry_script="score.py")
    Path("score.txt").write_text("")
    with pytest.raises(WebserviceException, match="not a Python file"):
        InferenceConfig("score.txt")
