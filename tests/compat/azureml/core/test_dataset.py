from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.datastore import Datastore
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.data.data_reference import DataReference
from paceline.compat.azureml.data.datapath import DataPath
from paceline.compat.azureml.data.dataset_consumption_config import DatasetConsumptionConfig
from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.submission import prepared


@pytest.fixture
def store(ws):
    found = ws.get_default_datastore()
    Path("in/d").mkdir(parents=True)
    Path("in/d/x.csv").write_text("a,b\n1,2\n3,4\n")
    found.upload(src_dir="in", target_path="t", overwrite=True, show_progress=False)
    return found


def test_the_default_store_by_its_names_in_azure(ws):
    store = Datastore.get(ws, "workspaceblobstore")
    assert (store.name, store.datastore_type) == ("workspaceblobstore", "AzureBlob")
    assert store == ws.get_default_datastore()
    assert Datastore(ws, "workspacefilestore").datastore_type == "AzureFile"
    with pytest.raises(UserErrorException, match="nowhere"):
        Datastore.get(ws, "nowhere")


def test_a_blob_container_is_registered_and_its_key_is_shown_nowhere(ws, monkeypatch):
    # Whether the extra for Azure's stores is installed does not matter here.
    monkeypatch.setattr("paceline.data.stores.datastore.check_installed", lambda record: None)
    made = Datastore.register_azure_blob_container(
        workspace=ws,
        datastore_name="mnist",
        container_name="sampledata",
        account_name="pipelinedata",
        account_key="k3y",
        overwrite=True,
    )
    assert (made.account_name, made.container_name, made.account_key) == ("pipelinedata", "sampledata", None)
    assert not [file for file in ws.path.rglob("*") if file.is_file() and "k3y" in file.read_text(errors="replace")]


def test_references_as_drivers_make_them(ws, store):
    reference = DataReference(datastore=store, data_reference_name="train", path_on_datastore="t", mode="download")
    assert str(reference) == "$AZUREML_DATAREFERENCE_train"
    assert reference.path("d").sources[0].path == "t/d"
    assert reference.path("d").as_download(path_on_compute="/tmp/x").path_on_compute is None
    made = DataPath(store, "t").create_data_reference("mine")
    assert (made.name, made.sources[0].datastore, made.sources[0].path) == ("mine", "default", "t")
    with pytest.raises(UserErrorException, match="no datastore"):
        DataReference("workspaceblobstore")


@pytest.mark.parametrize("way", ["pair", "path", "datapath", "list"])
def test_datasets_of_every_way_to_say_where(ws, store, way):
    given = {"pair": (store, "t/d/*.csv"), "path": store.path("t/d"), "datapath": DataPath(store, "t/d")}
    given["list"] = [given["pair"]]
    made = Dataset.Tabular.from_delimited_files(path=given[way])
    pytest.importorskip("pandas")
    assert made.to_pandas_dataframe()["b"].tolist() == [2, 4]


def test_datasets_are_registered_and_found_and_one_that_is_not_is_the_sdk_s_error(ws, store):
    made = Dataset.File.from_files(path=(store, "t"))
    made.register(workspace=ws, name="digits", description="d", create_new_version=True)
    found = Dataset.get_by_name(ws, "digits")
    assert (found.name, found.version) == ("digits", 1)
    assert ws.datasets["digits"].to_path() == ["/d/x.csv"]
    with pytest.raises(UserErrorException, match="nothing"):
        Dataset.get_by_name(ws, "nothing")
    with pytest.raises(UserErrorException, match="include_path"):
        Dataset.Tabular.from_delimited_files((store, "t"), include_path=True)


def test_data_of_a_job(ws, store):
    made = Dataset.File.from_files((store, "t"))
    out = OutputFileDatasetConfig("out", destination=(store, "res/{run-id}")).as_upload(overwrite=True)
    config = ScriptRunConfig(
        "src",
        "train.py",
        ["--a", made.as_named_input("a").as_mount(), "--b", DatasetConsumptionConfig("b", made), "--o", out],
    )
    job = prepared(config, ws, run_id="r_1").job
    modes = {one.name: (one.mode, one.sources[0].path) for one in job.inputs}
    assert modes == {"a": ("mount", "t"), "b": ("direct", "t"), "out": ("upload", "res/r_1")}
    assert job.arguments[-1] == "$AZUREML_DATAREFERENCE_out"
