from __future__ import annotations

import json
import os
import signal

import pytest

from paceline.data import Dataset, FileDataset, TabularDataset
from paceline.data.datasets import registered
from paceline.errors import DataError
from paceline.workspace import Workspace
from tests.helpers import fill_disk, start_python, write_tree


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "ws")


@pytest.fixture
def files(tmp_path):
    write_tree(tmp_path, {"data/a.csv": "x\n1\n", "data/b.csv": "x\n2\n"})
    return Dataset.File.from_files("data")


def test_a_registered_dataset_is_found_again_by_name_and_by_id(workspace, files):
    made = files.register(workspace, "digits", description="by hand", tags={"year": 2020})
    assert (made.name, made.version, len(made.fingerprint)) == ("digits", 1, 64)
    for found in (
        Dataset.get_by_name(workspace, "digits"),
        Dataset.get_by_name(workspace, "digits", version=1),
        Dataset.get_by_name(workspace, "digits", version="1"),
        Dataset.get_by_id(workspace, made.id),
        Dataset.get_all(workspace)["digits"],
    ):
        assert isinstance(found, FileDataset)
        assert (found.version, found.id, found.fingerprint) == (1, made.id, made.fingerprint)
        assert (found.description, found.tags) == ("by hand", {"year": "2020"})
        assert found.to_path() == ["/a.csv", "/b.csv"]
    # The stored JSON file has the keys that the documentation describes.
    data = json.loads((workspace.path / "datasets/digits/1.json").read_text())
    assert (data["file_count"], data["size_bytes"]) == (2, 8)


def test_description_and_tags_of_a_version_are_updated(workspace, files):
    made = files.register(workspace, "digits", description="by hand", tags={"year": 2020})
    assert made.update(tags={"year": 2021, "season": "autumn"}).tags == {"year": "2021", "season": "autumn"}
    assert made.update(description="checked").description == "checked"
    found = Dataset.get_by_name(workspace, "digits")
    assert (found.version, found.description, found.tags) == (1, "checked", {"year": "2020"})
    with pytest.raises(DataError, match="is for a registered dataset"):
        files.update(tags={})


def test_registered_tabular_dataset_keeps_its_read_options_and_row_and_column_selection(workspace, files):
    table = Dataset.Tabular.from_delimited_files("data", separator=";").random_split(0.5, seed=3)[0].keep_columns(["x"])
    table.register(workspace, "t")
    found = Dataset.get_by_name(workspace, "t")
    assert isinstance(found, TabularDataset)
    assert (found.reading, found.steps) == (table.reading, table.steps)
    assert len(found.to_pandas_dataframe()) == 1


def test_registering_the_same_data_again_returns_the_same_version(workspace, files):
    first = files.register(workspace, "digits")
    again = files.register(workspace, "digits", tags={"seen": "twice"})
    assert (again.version, again.id) == (1, first.id)
    assert Dataset.get_by_name(workspace, "digits").tags == {"seen": "twice"}
    assert files.register(workspace, "digits", create_new_version=True).version == 2


def test_registering_changed_content_under_an_existing_name_requires_create_new_version(workspace, files, tmp_path):
    files.register(workspace, "digits")
    with pytest.raises(DataError, match=r"version 1 is taken in another way.*create_new_version=True for version 2"):
        Dataset.Tabular.from_delimited_files("data").register(workspace, "digits")
    write_tree(tmp_path, {"data/c.csv": "x\n3\n"})
    with pytest.raises(DataError, match="version 1 is of other data"):
        files.register(workspace, "digits")
    assert files.register(workspace, "digits", create_new_version=True).version == 2
    assert Dataset.get_by_name(workspace, "digits").version == 2
    assert registered.versions(workspace.path, "digits") == [1, 2]


@pytest.mark.promise("added-removed-changed-since-dataset")
def test_dataset_check_lists_added_removed_and_changed_files(workspace, files, tmp_path):
    made = files.register(workspace, "digits")
    assert made.check()
    assert str(made.check()) == "dataset 'digits:1' has the content that was registered"
    write_tree(tmp_path, {"data/a.csv": "x\n11\n", "data/new.csv": ""})
    (tmp_path / "data/b.csv").unlink()
    found = Dataset.get_by_name(workspace, "digits").check()
    assert not found
    top = str(tmp_path / "data")
    assert (found.added, found.removed, found.changed) == ((f"{top}/new.csv",), (f"{top}/b.csv",), (f"{top}/a.csv",))
    assert "1 added" in str(found)
    assert "a.csv" in str(found)


def test_dataset_check_detects_a_rewritten_file_of_the_same_size(workspace, files, tmp_path):
    made = files.register(workspace, "digits")
    (tmp_path / "data/a.csv").write_text("x\n7\n")
    os.utime(tmp_path / "data/a.csv", ns=(1, 1))
    assert made.check().changed == (str(tmp_path / "data/a.csv"),)


def test_dataset_check_of_overlapping_sources_with_take_finds_no_change(workspace, files):
    dataset = Dataset.File.from_files(["data/b.csv", "data", "data/a.csv"]).take(1)
    made = dataset.register(workspace, "first")
    assert made.to_path() == ["/a.csv"]
    assert made.check()


def test_dataset_check_of_a_missing_folder_reports_all_files_removed(workspace, files, tmp_path):
    made = files.register(workspace, "digits")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert len(made.check().removed) == 2


def test_only_a_registered_dataset_can_be_checked(files, workspace):
    with pytest.raises(DataError, match=r"check\(\) is for a registered dataset"):
        files.check()
    with pytest.raises(DataError, match="for a registered dataset"):
        files.register(workspace, "d").take(1).check()


def test_error_for_an_unknown_dataset_name_or_version_lists_the_existing_names_or_versions(workspace, files):
    with pytest.raises(DataError, match="There are: none at all"):
        Dataset.get_by_name(workspace, "digits")
    files.register(workspace, "digits")
    with pytest.raises(DataError, match=r"no dataset 'letters'.*There are: 'digits'"):
        Dataset.get_by_name(workspace, "letters")
    for version in (2, "2", 0, "newest", None, "²"):
        with pytest.raises(DataError, match=r"has no version .* It has: 1"):
            Dataset.get_by_name(workspace, "digits", version=version)
    with pytest.raises(DataError, match="no dataset with the id 'abc'"):
        Dataset.get_by_id(workspace, "abc")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a:b", " a", "a ", "a.", "-a", "a\n", "ä", "x" * 201, None, 3]
)
def test_dataset_name_with_a_path_a_colon_or_another_invalid_character_is_refused(workspace, files, name):
    with pytest.raises(DataError, match="the dataset name"):
        files.register(workspace, name)
    assert registered.names(workspace.path) == []


@pytest.mark.parametrize("name", ["a", "MNIST data", "2024.v1", "a_b-c", "x" * 200])
def test_ordinary_dataset_names_are_accepted(workspace, files, name):
    assert files.register(workspace, name).version == 1
    assert registered.names(workspace.path) == [name]


@pytest.mark.promise("dataset-s-version-number-never")
def test_dataset_version_numbers_are_not_reused_after_unregistering(workspace, files):
    made = files.register(workspace, "digits")
    files.register(workspace, "digits", create_new_version=True)
    made.unregister_all_versions()
    assert Dataset.get_all(workspace) == {}
    # Version 1 must not be used again, because a run's "digits:1" must not refer to other data.
    assert files.register(workspace, "digits").version == 3
    made.unregister_all_versions()
    made.unregister_all_versions()


def test_register_refuses_an_object_that_is_no_workspace(files, tmp_path):
    for wrong in (None, "ws", tmp_path):
        with pytest.raises(DataError, match="is not a workspace"):
            files.register(wrong, "d")


def test_registering_a_dataset_in_a_workspace_other_than_that_of_its_datastore_is_refused(workspace, tmp_path):
    write_tree(workspace.path / "data", {"a": "1"})
    dataset = Dataset.File.from_files(("default", ""), workspace=workspace)
    with pytest.raises(DataError, match=r"datastores of this dataset are of the workspace .*ws', not of .*other"):
        dataset.register(Workspace(tmp_path / "other"), "d")


def test_reading_a_dataset_record_with_unknown_fields_or_steps_raises_data_error(workspace, files):
    files.register(workspace, "d")
    path = workspace.path / "datasets/d/1.json"
    for wrong in ({**json.loads(path.read_text()), "lens": 1}, [], {"steps": [["fold", 3]], "sources": []}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=r"1\.json' can't be read|the step \('fold', 3\)"):
            Dataset.get_by_name(workspace, "d")


def test_registering_a_dataset_on_a_full_disk_raises_and_stores_no_version(small_disk, files):
    workspace = Workspace(small_disk / "ws")
    (workspace.path / "datasets").mkdir()
    fill_disk(small_disk)
    with pytest.raises(DataError, match=r"'d' can't be written.*No space left"):
        files.register(workspace, "d")
    assert Dataset.get_all(workspace) == {}


REGISTER = """
import sys
from types import SimpleNamespace
from pathlib import Path
from paceline.data import Dataset
for _ in range(int(sys.argv[2])):
    made = Dataset.File.from_files("data").register(SimpleNamespace(path=Path(sys.argv[1])), "d", create_new_version=True)
    print(made.version, flush=True)
"""


def test_concurrent_registrations_of_a_dataset_get_different_versions(workspace, files):
    processes = [start_python(REGISTER, workspace.path, 20) for _ in range(3)]
    got = [int(line) for process in processes for line in process.communicate(timeout=180)[0].split()]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(got) == list(range(1, 61))


def test_killed_dataset_registration_leaves_complete_versions_and_no_lock(workspace, files):
    for lines in (1, 4, 9):
        process = start_python(REGISTER, workspace.path, 100_000)
        try:
            for _ in range(lines):
                process.stdout.readline()
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        known = registered.versions(workspace.path, "d")
        for version in known:
            assert Dataset.get_by_name(workspace, "d", version).check()
        assert files.register(workspace, "d", create_new_version=True).version > known[-1]
