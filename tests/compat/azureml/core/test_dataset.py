from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from paceline.compat.azureml.core.dataset import Dataset, DataType
from paceline.compat.azureml.core.datastore import Datastore
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.data.data_reference import DataPath, DataReference, DatasetConsumptionConfig
from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.submission import prepared
from paceline.data.stores import datastore as native


@pytest.fixture
def store(ws):
    found = ws.get_default_datastore()
    Path("in/d").mkdir(parents=True)
    Path("in/d/x.csv").write_text("a,b\n1,2\n3,4\n")
    found.upload(src_dir="in", target_path="t", overwrite=True, show_progress=False)
    return found


def test_default_datastore_is_returned_for_the_names_workspaceblobstore_and_workspacefilestore(ws):
    store = Datastore.get(ws, "workspaceblobstore")
    assert (store.name, store.datastore_type) == ("workspaceblobstore", "AzureBlob")
    assert store == ws.get_default_datastore()
    assert Datastore(ws, "workspacefilestore").datastore_type == "AzureFile"
    # An upload keeps an existing file unless `overwrite` is set.
    Path("kept").write_text("first")
    store.upload_files(["kept"], show_progress=False)
    Path("kept").write_text("second")
    store.upload_files(["kept"], show_progress=False)
    assert store.download("back", prefix="kept", show_progress=False) == 1
    assert Path("back/kept").read_text() == "first"
    with pytest.raises(UserErrorException, match="is not a file"):
        store.upload_files(["nothing"])
    with pytest.raises(UserErrorException, match="nowhere"):
        Datastore.get(ws, "nowhere")


def test_key_of_a_registered_blob_container_is_never_shown(ws, monkeypatch):
    # The test must not depend on whether the extra for Azure's stores is installed.
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


@pytest.mark.promise("can-t-had-replaced-sentence")
def test_azureml_datastore_registration_uses_the_paceline_datastore_of_the_same_name_if_configured(ws, tmp_path):
    share = {"datastore_name": "team", "file_share_name": "share", "account_name": "a", "account_key": "k3y"}
    with pytest.raises(UserErrorException, match=r"'share'.*paceline data add team"):
        Datastore.register_azure_file_share(ws, **share)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x.csv").write_text("a")
    native.Datastore.register(ws, "team", tmp_path / "files")
    stores = (
        Datastore.register_azure_file_share(ws, **share),
        Datastore.register_azure_blob_container(ws, "team", "container", "account", overwrite=True),
        Datastore.register_azure_data_lake_gen2(ws, "team", "files", "account", overwrite=True),
        Datastore.register_hdfs(ws, "team", "http", "url"),
    )
    assert {store.url for store in stores} == {str(tmp_path / "files")}
    assert stores[0].download("back", show_progress=False) == 1
    with pytest.raises(UserErrorException, match=r"pandas\.read_sql"):
        Datastore.register_azure_postgre_sql(ws, "team", "server", "database")


def test_data_reference_accepts_the_sdks_arguments_and_its_text_is_the_sdks_variable_placeholder(ws, store):
    reference = DataReference(datastore=store, data_reference_name="train", path_on_datastore="t", mode="download")
    assert str(reference) == "$AZUREML_DATAREFERENCE_train"
    assert reference.path("d").sources[0].path == "t/d"
    assert reference.path("d").as_download(path_on_compute="/tmp/x").path_on_compute is None
    made = DataPath(store, "t").create_data_reference("mine")
    assert (made.name, made.sources[0].datastore, made.sources[0].path) == ("mine", "default", "t")
    with pytest.raises(UserErrorException, match="is not a datastore"):
        DataReference("workspaceblobstore")


@pytest.mark.parametrize("way", ["pair", "path", "datapath", "list"])
def test_tabular_dataset_reads_the_same_rows_from_each_form_of_a_datastore_path(ws, store, way):
    given = {"pair": (store, "t/d/*.csv"), "path": store.path("t/d"), "datapath": DataPath(store, "t/d")}
    given["list"] = [given["pair"]]
    made = Dataset.Tabular.from_delimited_files(path=given[way])
    pytest.importorskip("pandas")
    assert made.to_pandas_dataframe()["b"].tolist() == [2, 4]


def test_registered_dataset_is_found_and_an_unknown_one_raises(ws, store):
    made = Dataset.File.from_files(path=(store, "t"))
    made.register(workspace=ws, name="digits", description="d", create_new_version=True)
    found = Dataset.get_by_name(ws, "digits")
    assert (found.name, found.version) == ("digits", 1)
    assert ws.datasets["digits"].to_path() == ["/d/x.csv"]
    with pytest.raises(UserErrorException, match="nothing"):
        Dataset.get_by_name(ws, "nothing")
    assert found.add_tags({"a": 1}).tags == Dataset.get_by_name(ws, "digits").tags == {"a": "1"}
    assert found.remove_tags(["a"]).tags == {}
    with pytest.raises(UserErrorException, match="partition_format"):
        Dataset.File.from_files((store, "t"), partition_format="/x.csv")


@pytest.mark.promise("datasets-given-mounted-filtered-read")
def test_mounted_files_are_removed_at_the_end_of_the_context(ws, store):
    made = Dataset.File.from_files((store, "t"))
    with made.mount() as mounted:
        assert Path(mounted.mount_point, "d/x.csv").read_text().startswith("a,b")
    assert not Path(mounted.mount_point).exists()
    Path("here").mkdir()
    context = made.mount("here")
    context.start()
    assert [path.name for path in Path("here").iterdir()] == ["d"]
    with pytest.raises(UserErrorException, match="not empty"):
        made.mount("here").start()
    context.stop()
    assert [*Path("here").iterdir()] == []
    # After the unmount the dataset's files still exist.
    assert made.download("copy") == [str(Path("copy/d/x.csv").absolute())]


@pytest.mark.promise("datasets-given-mounted-filtered-read")
def test_tabular_dataset_is_filtered_by_column_values(ws, store):
    pytest.importorskip("pandas")
    table = Dataset.Tabular.from_delimited_files((store, "t")).register(ws, "rows")
    assert table.filter((table["a"] > 1) & ~(table["b"] == 2)).to_pandas_dataframe()["a"].tolist() == [3]
    assert len(table.filter((table["a"] == 1) | table["b"].is_null()).to_pandas_dataframe()) == 1
    assert len(table.take_sample(0.5, seed=3).to_pandas_dataframe()) == len(
        table.take_sample(0.5, 3).to_pandas_dataframe()
    )
    # A table keeps its filter when it is registered, and when it is given to a script as an input.
    chosen = table.filter(table["a"] > 1).register(ws, "chosen")
    assert Dataset.get_by_name(ws, "chosen").to_pandas_dataframe()["b"].tolist() == [4]
    assert '["filter", [">", "a", 1]]' in str(chosen.native_input("x").table)
    assert chosen.to_csv_files().to_path() == ["/part-00000.csv"]
    with pytest.raises(UserErrorException, match="no column 'c'"):
        table.filter(table["c"] > 1).to_pandas_dataframe()
    with pytest.raises(UserErrorException, match="with & and"):
        table.filter(table["a"] > 1 and table["b"] > 1)


@pytest.mark.promise("datasets-given-mounted-filtered-read")
def test_tabular_dataset_parses_datetime_columns_and_filters_rows_by_time(ws):
    pandas = pytest.importorskip("pandas")
    for city, day in (("Bern", "2019/12/31"), ("Bern", "2020/01/02"), ("Chur", "2020/01/02")):
        Path("logs", city, day).mkdir(parents=True)
        Path("logs", city, day, "data.csv").write_text(f"n,code,at\n1,007,{day} 10:00\nx,008,no day\n")
    table = Dataset.Tabular.from_delimited_files(
        "logs",
        include_path=True,
        set_column_types={
            "n": DataType.to_long(),
            "code": DataType.to_string(),
            "at": DataType.to_datetime("%Y/%m/%d %H:%M"),
        },
        partition_format="/{city}/{day:yyyy/MM/dd}/data.csv",
    )
    frame = table.to_pandas_dataframe()
    assert [*frame.columns] == ["city", "day", "Path", "n", "code", "at"]
    assert frame["code"].tolist()[:2] == ["007", "008"]
    # A value that can't be converted to its column's type is missing.
    assert frame["n"].isna().tolist() == frame["at"].isna().tolist() == [False, True] * 3
    assert frame["Path"][0] == "/Bern/2019/12/31/data.csv"
    timed = table.with_timestamp_columns("day")
    assert len(timed.time_after(dt.datetime(2020, 1, 1)).to_pandas_dataframe()) == 4
    assert len(timed.time_between(dt.datetime(2019, 1, 1), dt.datetime(2019, 12, 31)).to_pandas_dataframe()) == 2
    assert timed.time_recent(dt.timedelta(days=1)).to_pandas_dataframe().empty
    assert frame["day"][0] == pandas.Timestamp("2019-12-31")
    for wrong, said in (
        ({"partition_format": "data.csv"}, "names no column"),
        ({"set_column_types": {"n": "real"}}, "real"),
    ):
        with pytest.raises(UserErrorException, match=said):
            Dataset.Tabular.from_delimited_files("logs", **wrong)
    with pytest.raises(UserErrorException, match="no timestamp"):
        table.time_recent(dt.timedelta(days=1))


def test_dataset_arguments_become_inputs_and_outputs_of_the_job(ws, store):
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
    placed = made.as_named_input("placed").as_mount("/mnt/placed")
    (said,) = prepared(ScriptRunConfig("src", "train.py", ["--a", placed]), ws).notes
    assert "'placed' does not appear at /mnt/placed" in said
