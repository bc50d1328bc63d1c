from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.data import DataReference, Dataset, Datastore, FileDataset, Source, TabularDataset
from paceline.data.datasets.dataset import opened
from paceline.errors import DataError, TransferError
from paceline.workspace import Workspace
from tests.helpers import fill_disk, run_python, write_tree
from tests.late import late

pandas = late("pandas")
pytestmark = pytest.mark.skipif(
    not (find_spec("pandas") and find_spec("pyarrow")), reason="needs pandas and pyarrow: paceline[tabular]"
)

ROWS = DataReference(name="rows", sources=())
CSV = {"data/a.csv": "x,y\n1,one\n2,two\n", "data/b.csv": "x,y\n3,three\n", "data/sub/c.csv": "x,y\n4,four\n"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "ws")


@pytest.fixture
def data(tmp_path):
    return write_tree(tmp_path, CSV) / "data"


def in_the_default_store(workspace, files):
    return write_tree(workspace.path / "data", files)


def frame_of(table: TabularDataset) -> Any:
    return table.to_pandas_dataframe()


def xs(dataset):
    return frame_of(dataset)["x"].tolist()


# --- tests of file datasets


def test_dataset_path_may_be_a_folder_file_pattern_or_list(data):
    assert Dataset.File.from_files("data").to_path() == ["/a.csv", "/b.csv", "/sub/c.csv"]
    assert Dataset.File.from_files(data / "a.csv").to_path() == ["/a.csv"]
    assert Dataset.File.from_files(f"{data}/*.csv").to_path() == ["/a.csv", "/b.csv"]
    assert Dataset.File.from_files("data/**/*.csv").to_path() == ["/a.csv", "/b.csv", "/sub/c.csv"]
    assert Dataset.File.from_files(["data/a.csv", "data/b.csv", "data/a.csv"]).to_path() == ["/a.csv", "/b.csv"]
    assert Dataset.File.from_files(data.as_uri()).to_path() == ["/a.csv", "/b.csv", "/sub/c.csv"]


def test_datastore_files_are_found_by_store_name_or_reference(workspace):
    in_the_default_store(workspace, {"train/a.txt": "a", "train/b.bin": "b"})
    assert Dataset.File.from_files(("default", "train"), workspace=workspace).to_path() == ["/a.txt", "/b.bin"]
    assert Dataset.File.from_files([("default", "train/*.txt")], workspace=workspace).to_path() == ["/a.txt"]
    reference = DataReference(name="x", sources=(Source(datastore="default", path="train"),))
    assert Dataset.File.from_files(reference, workspace=workspace).to_path() == ["/a.txt", "/b.bin"]


def test_dataset_takes_the_workspace_from_its_datastore(workspace, tmp_path):
    write_tree(tmp_path, {"lab/train/a.txt": "a", "lab/b.txt": "b"})
    store = Datastore.register(workspace, "lab", tmp_path / "lab")
    assert Dataset.File.from_files((store, "train")).to_path() == ["/a.txt"]
    assert Dataset.File.from_files(store).to_path() == ["/b.txt", "/train/a.txt"]
    assert [os.path.basename(path) for path in Dataset.File.from_files([(store, "*.txt")]).download("out")] == ["b.txt"]
    with pytest.raises(DataError, match="several workspaces"):
        Dataset.File.from_files([(store, "train"), Datastore(Workspace(tmp_path / "other"))])


def test_download_keeps_folders_and_returns_the_paths(data, tmp_path):
    paths = Dataset.File.from_files("data").download("out")
    assert paths == [str(tmp_path / "out" / name) for name in ("a.csv", "b.csv", "sub/c.csv")]
    assert Path(paths[2]).read_text() == CSV["data/sub/c.csv"]
    assert sorted(os.listdir("out")) == ["a.csv", "b.csv", "sub"]


def test_download_replaces_files_only_with_overwrite(data, tmp_path):
    write_tree(tmp_path, {"out/b.csv": "mine"})
    with pytest.raises(DataError, match=r"out/b\.csv' is there already \(1 of 3 files are\)"):
        Dataset.File.from_files("data").download("out")
    assert os.listdir("out") == ["b.csv"]
    Dataset.File.from_files("data").download("out", overwrite=True)
    assert Path("out/b.csv").read_text() == CSV["data/b.csv"]


def test_download_of_a_pattern_leaves_no_input_folder_in_the_cache(data, tmp_path):
    assert len(Dataset.File.from_files("data/*.csv").download("out")) == 2
    assert [entry for entry in os.listdir(tmp_path / "cache/views") if not entry.startswith(".")] == []


def test_files_with_spaces_quotes_and_newlines_in_their_names_are_downloaded(tmp_path):
    names = ["a b", "'\"", "ünï", "x:y", "line\nbreak", "-rf", "$HOME"]
    write_tree(tmp_path / "data", dict.fromkeys(names, "x"))
    dataset = Dataset.File.from_files("data")
    assert dataset.to_path() == [f"/{name}" for name in sorted(names)]
    assert sorted(os.path.basename(path) for path in dataset.download("out")) == sorted(names)


def test_circular_and_broken_symlinks_are_skipped(data):
    (data / "sub/back").symlink_to(data, target_is_directory=True)
    (data / "nowhere").symlink_to(data / "missing")
    os.mkfifo(data / "pipe")
    dataset = Dataset.File.from_files("data")
    assert dataset.to_path() == ["/a.csv", "/b.csv", "/sub/c.csv"]
    assert len(dataset.download("out")) == 3


def test_dataset_download_to_a_full_disk_raises_and_leaves_no_partial_file(data, small_disk):
    fill_disk(small_disk)
    with pytest.raises(TransferError, match=r"a\.csv' can't be copied to .*disk/out/a\.csv': No space left"):
        Dataset.File.from_files("data").download(small_disk / "out")
    assert not list(small_disk.glob("out/*"))


def test_take_skip_and_split_select_files_in_path_order(data):
    dataset = Dataset.File.from_files("data")
    assert dataset.take(2).to_path() == ["/a.csv", "/b.csv"]
    assert dataset.skip(1).take(1).to_path() == ["/b.csv"]
    assert [os.path.basename(path) for path in dataset.skip(2).download("out")] == ["c.csv"]
    first, second = dataset.random_split(0.67, seed=1)
    assert sorted(first.to_path() + second.to_path()) == dataset.to_path()
    assert len(first.to_path()) == 2


def test_input_with_equal_file_names_or_no_files_is_refused(tmp_path):
    write_tree(tmp_path, {"data/a/x": "1", "data/b/x": "2"})
    with pytest.raises(DataError, match=r"would be one file 'x'.*Choose by patterns"):
        Dataset.File.from_files("data").take(2).as_mount()
    with pytest.raises(DataError, match="left no file"):
        Dataset.File.from_files("data").take(0).as_mount()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "nothing at"),
        ("data/*.parquet", "no file matches"),
        ([], "names no files"),
        ("", "names no files"),
        ("a\0b", "names no files"),
        (None, "None names no files"),
        ((3, "x"), "3 is not a datastore"),
        (DataReference(name="out", sources=(Source(datastore="default", path="x"),), mode="upload"), "is an output"),
    ],
)
def test_creating_a_dataset_from_a_path_without_files_raises_data_error(data, path, message):
    with pytest.raises(DataError, match=message):
        Dataset.File.from_files(path)


def test_a_url_with_a_password_is_refused_without_showing_it():
    with pytest.raises(DataError) as caught:
        Dataset.File.from_files("sftp://me:hunter2@host/data")
    assert "hunter2" not in str(caught.value)


def test_empty_folder_is_refused_unless_validation_is_off(tmp_path, workspace):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no files at .*validate=False"):
        Dataset.File.from_files("empty")
    dataset = Dataset.File.from_files("empty", validate=False)
    with pytest.raises(DataError, match="'e' needs files"):
        dataset.register(workspace, "e")


def test_dataset_built_from_a_store_name_lists_its_files_only_after_register(workspace):
    in_the_default_store(workspace, {"train/a.txt": "a"})
    dataset = Dataset.File.from_files(("default", "train"))
    with pytest.raises(DataError, match="names the datastore 'default', but not whose"):
        dataset.to_path()
    assert dataset.register(workspace, "d").to_path() == ["/a.txt"]


# --- tests of datasets as inputs of a run


def test_dataset_used_as_an_input_returns_a_data_reference_with_the_chosen_mode(data, workspace):
    dataset = Dataset.File.from_files("data").register(workspace, "my digits")
    reference = dataset.as_named_input("train")
    assert (reference.name, reference.mode, reference.sources) == ("train", "direct", (Source(path=str(data)),))
    assert (reference.dataset, reference.fingerprint) == ("my digits:1", dataset.fingerprint)
    assert reference.as_mount().mode == "mount"
    assert str(dataset.as_mount()) == "$AZUREML_DATAREFERENCE_my_digits"
    assert dataset.as_download("here").path_on_compute == "here"
    assert (dataset.as_partition("rank").partition, dataset.as_partition("rank").mode) == ("rank", "download")
    assert Dataset.File.from_files("data").as_mount().name == Dataset.File.from_files(str(data)).as_mount().name


def test_input_name_of_a_dataset_whose_name_begins_with_a_digit_gets_a_prefix(data, workspace):
    assert Dataset.File.from_files("data").register(workspace, "2024.v1").as_mount().name == "input_2024_v1"


def test_worker_gets_a_file_dataset_of_the_downloaded_folder(data, workspace):
    reference = Dataset.File.from_files("data").register(workspace, "d").as_named_input("train")
    found = opened(reference, data)
    assert isinstance(found, FileDataset)
    assert found.to_path() == ["/a.csv", "/b.csv", "/sub/c.csv"]
    assert (found.name, found.version, found.fingerprint) == ("d", 1, reference.fingerprint)


def test_worker_reads_a_downloaded_tabular_dataset_with_its_row_and_column_selection_applied(data, workspace):
    table = Dataset.Tabular.from_delimited_files("data").skip(1).keep_columns("x").register(workspace, "t")
    found = opened(table.as_named_input("rows"), data)
    assert isinstance(found, TabularDataset)
    assert frame_of(found).to_dict("list") == {"x": [2, 3, 4]}
    assert (found.name, found.version) == ("t", 1)
    # The worker receives the reference as JSON.
    sent = json.loads(json.dumps(table.as_named_input("rows").to_json()))
    assert xs(opened(DataReference.from_json(sent), data)) == [2, 3, 4]


def test_table_format_is_inferred_from_file_extensions_and_mixed_extensions_raise_an_error(data, tmp_path):
    assert xs(TabularDataset.from_folder(ROWS, data)) == [1, 2, 3, 4]
    write_tree(tmp_path, {"odd/a.csv": "x\n1\n", "odd/b.xyz": ""})
    with pytest.raises(DataError, match=r"file extensions \['\.csv', '\.xyz'\]"):
        TabularDataset.from_folder(ROWS, "odd").to_pandas_dataframe()
    with pytest.raises(DataError, match=r"'rows': its table='\{' is not JSON"):
        TabularDataset.from_folder(replace(ROWS, table="{"), data)


def test_a_worker_reads_its_table_without_fsspec(data):
    code = f"""
import sys
for name in ("fsspec", "obstore", "aiohttp"):
    sys.modules[name] = None
from paceline.data import DataReference, TabularDataset
print(len(TabularDataset.from_folder(DataReference(name="x", sources=()), {str(data)!r}).to_pandas_dataframe()))
"""
    assert run_python(code).split() == ["4"]


# --- tests of tables


def test_delimited_files_are_concatenated(data):
    table = Dataset.Tabular.from_delimited_files("data/**/*.csv")
    frame = frame_of(table)
    assert frame["x"].tolist() == [1, 2, 3, 4]
    assert frame["y"].tolist() == ["one", "two", "three", "four"]
    assert frame.index.tolist() == [0, 1, 2, 3]


def test_delimited_files_are_read_with_the_given_separator_header_encoding_and_types(tmp_path):
    write_tree(tmp_path, {"a.txt": "1;é\n;b\n".encode("latin-1")})
    options = {"separator": ";", "header": False, "encoding": "latin-1"}
    frame = frame_of(Dataset.Tabular.from_delimited_files("a.txt", **options))
    assert frame.columns.tolist() == ["Column1", "Column2"]
    assert frame["Column2"].tolist() == ["é", "b"]
    assert frame["Column1"].isna().tolist() == [False, True]
    text = Dataset.Tabular.from_delimited_files(
        "a.txt", infer_column_types=False, empty_as_string=True, **options
    ).to_pandas_dataframe()
    assert text["Column1"].tolist() == ["1", ""]


def test_parquet_json_lines_and_compressed_files_are_read(tmp_path):
    frame = pandas.DataFrame({"x": [1, 2], "y": ["a", None]})
    (tmp_path / "k=1").mkdir()
    frame.to_parquet("k=1/p.parquet")
    assert frame_of(Dataset.Tabular.from_parquet_files("k=1")).columns.tolist() == ["x", "y"]
    write_tree(tmp_path, {"lines/a.jsonl": '{"x": 1}\n{"x": 2}\n', "lines/b.jsonl": ""})
    assert xs(Dataset.Tabular.from_json_lines_files("lines")) == [1, 2]
    write_tree(tmp_path, {"zip/a.csv.gz": gzip.compress(b"x\n7\n")})
    assert xs(Dataset.Tabular.from_delimited_files("zip")) == [7]


def test_json_lines_values_keep_their_types(tmp_path):
    write_tree(tmp_path, {"rows.jsonl": '{"id": "007", "time_at": 1700000000}\n\n{"id": "8", "time_at": 1}\n'})
    found = frame_of(Dataset.Tabular.from_json_lines_files(tmp_path / "rows.jsonl"))
    assert found.to_dict("list") == {"id": ["007", "8"], "time_at": [1700000000, 1]}


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_large_integers_beside_missing_values_are_read_exactly(tmp_path, form):
    large = 2**53 + 1
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        path.write_text(f"n,id\n{large},7\n,\n1.5,8\nx,9\n")
    elif form == "jsonl":
        path.write_text(f'{{"n": {large}, "id": 7}}\n{{"n": null, "id": null}}\n')
    else:
        pandas.DataFrame({"n": [large, None], "id": [7, None]}, dtype=object).to_parquet(path)
    names = {"csv": "delimited", "jsonl": "json_lines", "parquet": "parquet"}
    make = getattr(Dataset.Tabular, f"from_{names[form]}_files")
    found = frame_of(make(path, set_column_types={"n": "int", "id": "str"}))
    assert (int(found["n"][0]), found["id"][0]) == (large, "7")
    assert found.isna().to_numpy()[1].all()


def test_empty_csv_files_have_no_rows(tmp_path):
    write_tree(tmp_path, {"d/a.csv": "", "d/b.csv": "x\n1\n", "d/c.csv": "x\n"})
    frame = Dataset.Tabular.from_delimited_files("d").to_pandas_dataframe()
    assert frame["x"].tolist() == [1]
    assert str(frame["x"].dtype) == "int64"
    write_tree(tmp_path, {"e/a.csv": ""})
    assert len(Dataset.Tabular.from_delimited_files("e").to_pandas_dataframe()) == 0


def test_selection_steps_are_applied_in_order(data):
    table = Dataset.Tabular.from_delimited_files("data")
    assert xs(table.take(3).skip(1)) == [2, 3]
    assert xs(table.skip(1).take(3)) == [2, 3, 4]
    assert xs(table.take(0)) == []
    assert xs(table.take(99)) == [1, 2, 3, 4]
    assert frame_of(table.keep_columns(["y", "x"])).columns.tolist() == ["y", "x"]
    assert frame_of(table.drop_columns("y")).columns.tolist() == ["x"]
    with pytest.raises(DataError, match=r"keep_columns: there is no column 'z'; there are \['x', 'y'\]"):
        table.keep_columns("z").to_pandas_dataframe()


def test_take_stops_reading_at_its_last_row(tmp_path):
    write_tree(tmp_path, {"d/a.csv": "x\n1\n2\n", "d/b.csv": b"x\n\xff\n"})
    assert xs(Dataset.Tabular.from_delimited_files("d").take(2)) == [1, 2]
    with pytest.raises(DataError, match=r"'b\.csv' can't be read as delimited"):
        Dataset.Tabular.from_delimited_files("d").take(3).to_pandas_dataframe()


def test_random_split_is_reproducible_and_covers_every_row_once(tmp_path):
    write_tree(tmp_path, {"n.csv": "x\n" + "\n".join(map(str, range(100)))})
    table = Dataset.Tabular.from_delimited_files("n.csv")
    train, test = table.random_split(0.8, seed=7)
    assert (len(xs(train)), len(xs(test))) == (80, 20)
    assert sorted(xs(train) + xs(test)) == list(range(100))
    assert xs(train) == sorted(xs(train)) == xs(table.random_split(0.8, seed=7)[0])
    assert xs(test) != xs(table.random_split(0.8, seed=8)[1])
    # Without a seed, random_split draws a seed and stores it in both parts.
    first, second = table.random_split(0.5)
    assert sorted(xs(first) + xs(second)) == list(range(100))
    assert [len(xs(part)) for part in table.random_split(1.0)] == [100, 0]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda table: table.take(-1), r"take\(-1\)"),
        (lambda table: table.skip("2"), r"skip\('2'\)"),
        (lambda table: table.take(True), "take"),
        (lambda table: table.random_split(1.5), r"percentage=1\.5"),
        (lambda table: table.random_split(80), "percentage=80"),
        (lambda table: table.keep_columns([]), "keep_columns"),
        (lambda table: table.drop_columns([1]), "drop_columns"),
    ],
)
def test_calling_a_selection_step_with_invalid_arguments_raises_data_error(data, act, message):
    with pytest.raises(DataError, match=message):
        act(Dataset.Tabular.from_delimited_files("data"))


@pytest.mark.parametrize(
    ("content", "make"),
    [
        (b"PAR1 not really", Dataset.Tabular.from_parquet_files),
        (b"", Dataset.Tabular.from_parquet_files),
        (b'{"x": 1', Dataset.Tabular.from_json_lines_files),
        (b'x,y\n1,2\n"open', Dataset.Tabular.from_delimited_files),
        (b"x\n\xff\xfe\n", Dataset.Tabular.from_delimited_files),
    ],
)
def test_broken_table_file_is_named_in_the_error(tmp_path, content, make):
    write_tree(tmp_path, {"bad": content})
    with pytest.raises(DataError, match=r"'bad' can't be read as .*Fix the file"):
        make("bad").to_pandas_dataframe()


def test_pandas_frame_is_stored_and_registered(workspace):
    frame = pandas.DataFrame({"x": [1, 2], "y": ["a", "b"]}, index=[7, 9])
    first = Dataset.Tabular.register_pandas_dataframe(
        frame, (Datastore(workspace), "frames"), "f", description="two rows"
    )
    assert frame_of(first).to_dict("list") == {"x": [1, 2], "y": ["a", "b"]}
    assert (first.version, first.description) == (1, "two rows")
    second = Dataset.Tabular.register_pandas_dataframe(frame.assign(x=0), Datastore(workspace), "f")
    assert second.version == 2
    assert xs(Dataset.get_by_name(workspace, "f", version=1)) == [1, 2]
    assert xs(Dataset.get_by_name(workspace, "f")) == [0, 0]


def test_register_pandas_dataframe_refuses_a_wrong_frame_target_or_name(workspace):
    with pytest.raises(DataError, match=r"a dict can't be stored as Parquet"):
        Dataset.Tabular.register_pandas_dataframe({"x": 1}, Datastore(workspace), "f")
    with pytest.raises(DataError, match="target='frames': give a Datastore"):
        Dataset.Tabular.register_pandas_dataframe(pandas.DataFrame(), "frames", "f")
    with pytest.raises(DataError, match=r"dataset name '\.\./f'"):
        Dataset.Tabular.register_pandas_dataframe(pandas.DataFrame(), Datastore(workspace), "../f")


def test_uploaded_folder_becomes_a_dataset(workspace, tmp_path):
    write_tree(tmp_path, {"flat/a": "1", "flat/b": "2"})
    dataset = Dataset.File.upload_directory("flat", (Datastore(workspace), "up"))
    assert dataset.to_path() == ["/a", "/b"]
    assert dataset.register(workspace, "up").version == 1


def test_input_made_from_a_selection_of_a_registered_dataset_records_the_name_of_that_dataset(workspace, tmp_path):
    # Regression: a run that used the training part of a split did not record which dataset had been split.
    write_tree(tmp_path / "store", {f"{n}.csv": f"a\n{n}\n" for n in range(4)})
    store = Datastore.register(workspace, "split", tmp_path / "store")
    files = Dataset.File.from_files((store, "*.csv")).register(workspace, "files-to-split")
    table = Dataset.Tabular.from_delimited_files((store, "*.csv")).register(workspace, "table-to-split")
    part = files.take(2).as_named_input("part")
    assert (part.dataset, part.fingerprint) == ("files-to-split:1", None)
    train = table.random_split(0.5, seed=1)[0].keep_columns("a").as_named_input("train")
    assert (train.dataset, train.fingerprint) == ("table-to-split:1", table.fingerprint)
    assert files.take(2).register(workspace, "part").as_named_input("x").dataset == "part:1"
