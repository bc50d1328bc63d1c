from __future__ import annotations

import io
from pathlib import Path

import pytest

from paceline.errors import FileNameError, RunNotFoundError, UserError
from paceline.workspace import Experiment, Workspace
from tests.helpers import write_tree


@pytest.fixture
def run(tmp_path):
    with Experiment(Workspace("ws"), "digits").start_logging() as run:
        for name in ("outputs/a", "outputs/d/b", "plot.png"):
            run.upload_file(name, io.BytesIO(name.encode()))
        yield run


def test_a_file_is_uploaded_listed_and_downloaded(run, tmp_path):
    write_tree(tmp_path, {"model.pt": "weights"})
    assert run.upload_file("outputs/model.pt", "model.pt") == "outputs/model.pt"
    assert run.get_file_names() == ["outputs/a", "outputs/d/b", "outputs/model.pt", "plot.png"]
    assert Path(run.download_file("outputs/model.pt", "copy")).read_text() == "weights"


def test_upload_files_pairs_names_with_paths_and_refuses_unequal_counts(run, tmp_path):
    write_tree(tmp_path, {"x": "1", "y": "2"})
    assert run.upload_files(["one", "two"], ["x", "y"]) == ["one", "two"]
    with pytest.raises(UserError, match="2 names but 1 paths"):
        run.upload_files(["one", "two"], ["x"])


def test_upload_folder_stores_the_files_of_a_folder_under_the_given_name(run, tmp_path):
    write_tree(tmp_path, {"plots/a/b": ""})
    assert run.upload_folder("mine", "plots") == ["mine/a/b"]


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ({}, ["outputs/a", "outputs/d/b", "plot.png"]),
        ({"prefix": "outputs/"}, ["outputs/a", "outputs/d/b"]),
        ({"prefix": "outputs/d"}, ["outputs/d/b"]),
        ({"prefix": "outputs/", "output_directory": "to"}, ["to/outputs/a", "to/outputs/d/b"]),
        ({"prefix": "outputs/", "output_directory": "to", "append_prefix": False}, ["to/a", "to/d/b"]),
        ({"prefix": "outputs", "output_directory": "to", "append_prefix": False}, ["to/a", "to/d/b"]),
        ({"prefix": "plot.png", "append_prefix": False}, ["plot.png"]),
        ({"prefix": "outputs/", "output_paths": ["x", "y/z"]}, ["x", "y/z"]),
    ],
    ids=str,
)
def test_files_are_downloaded_by_name_prefix(run, arguments, paths):
    assert run.download_files(**arguments) == paths
    assert all(Path(path).is_file() for path in paths)


def test_download_of_an_unmatched_name_prefix_is_refused(run):
    with pytest.raises(RunNotFoundError, match="no file that begins with 'models/'"):
        run.download_files("models/")


def test_download_with_too_few_output_paths_is_refused(run):
    with pytest.raises(UserError, match="1 output_paths for 2 files"):
        run.download_files("outputs/", output_paths=["x"])


@pytest.mark.promise("file-name-leaves-run-s")
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "outputs/../../x"])
def test_file_name_outside_the_run_is_refused(run, name):
    for call in (
        run.download_file,
        lambda name: run.upload_file(name, io.BytesIO()),
        lambda name: run.upload_folder(name, "."),
    ):
        with pytest.raises(FileNameError):
            call(name)
