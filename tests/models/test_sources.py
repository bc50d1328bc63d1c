"""Objects that may become a model, and refusals, each in one clear sentence."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.errors import ModelError
from paceline.models import sources
from paceline.runs import states
from tests.helpers import make_run, write_tree


@pytest.fixture
def made(tmp_path):
    return write_tree(tmp_path / "made", {"weights": "1", "sub/config": "2"})


@pytest.fixture
def folder(tmp_path):
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING)
    os.close(fd)
    write_tree(
        folder.path, {"outputs/model/a": "1", "outputs/best.bin": "2", "checkpoints/step-9/w": "3", "work/x": "4"}
    )
    return folder


def names(source):
    return [file.name for file in source.files]


def test_model_source_made_from_a_folder_has_the_folders_name_and_all_its_files(made):
    source = sources.local(made)
    assert (source.top, source.is_folder, names(source)) == ("made", True, ["made/sub/config", "made/weights"])
    assert sources.local(f"{made}/").top == "made"
    assert names(sources.local(made / "weights")) == ["weights"]


def test_model_source_given_as_a_dot_is_named_after_the_working_directory(made, monkeypatch):
    monkeypatch.chdir(made)
    assert sources.local(".").top == "made"
    assert names(sources.local("./weights")) == ["weights"]


def test_symlinks_in_a_local_folder_are_followed(made, tmp_path):
    """As libraries that keep files by content lay them out."""
    write_tree(tmp_path, {"contents/0a1b": "tensor", "more/x": "1"})
    (made / "model.safetensors").symlink_to("../contents/0a1b")
    (made / "more").symlink_to(tmp_path / "more")
    assert names(sources.local(made)) == ["made/model.safetensors", "made/more/x", "made/sub/config", "made/weights"]


def pipe(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (pipe, r"odd' is a pipe: a model keeps files alone\. Remove it"),
        (unix_socket, r"odd' is a socket: a model keeps files alone"),
        (lambda path: path.symlink_to("nowhere"), r"odd' is a link that leads nowhere\. Remove it"),
        (lambda path: path.symlink_to(".."), r"sub' is a link to a folder that it lies in|odd' is a link to a folder"),
        (lambda path: path.symlink_to("odd"), r"odd' is a link that leads nowhere"),
    ],
    ids=["pipe", "socket", "dead-link", "circle", "own-circle"],
)
def test_model_folder_with_a_pipe_socket_or_broken_link_is_refused_and_the_error_names_the_path(
    made, tmp_path, monkeypatch, spoil, said
):
    monkeypatch.chdir(made)  # the path of a socket may have at most 107 characters
    spoil(type(made)("sub/odd"))
    with pytest.raises(ModelError, match=said):
        sources.local(made)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nix", r"there is no 'nix' here: No such file or directory\. Name the file or folder"),
        ("", "the path '': give the path"),
        (None, "the path None: give the path"),
        (3, "the path 3: give the path"),
        ("empty", r"there is no file in the folder 'empty'\. Name the one that holds the model"),
        ("pipe", r"'pipe' is a pipe, and no file or folder"),
        ("link", r"'link' is a link that leads nowhere"),
        ("/", r"'/' can't be a model's folder"),
        ("weights/x", r"there is no 'weights/x' here: Not a directory"),
    ],
)
def test_model_path_that_is_missing_or_has_no_files_is_refused(made, monkeypatch, path, said):
    monkeypatch.chdir(made)
    os.makedirs("empty/deep")
    os.mkfifo("pipe")
    os.symlink("nowhere", "link")
    with pytest.raises(ModelError, match=said):
        sources.local(path)


def test_file_name_that_is_not_utf8_is_refused(made):
    (made / os.fsdecode(b"\xff")).write_text("1")
    with pytest.raises(ModelError, match=r"is not UTF-8\. Rename the file"):
        sources.local(made)


# --- tests of models from a run


def test_file_names_of_a_model_from_a_run_start_with_the_last_part_of_the_given_path(folder):
    assert names(sources.of_run(folder, "outputs/model")) == ["model/a"]
    assert names(sources.of_run(folder, "./outputs//best.bin")) == ["best.bin"]
    assert names(sources.of_run(folder, "outputs")) == ["outputs/best.bin", "outputs/model/a"]


def test_symlink_to_another_file_of_the_run_is_followed(folder):
    (folder.outputs / "model/latest").symlink_to("../../checkpoints/step-9")
    (folder.outputs / "link.bin").symlink_to("best.bin")
    assert names(sources.of_run(folder, "outputs/model")) == ["model/a", "model/latest/w"]
    source = sources.of_run(folder, "outputs/link.bin")
    assert names(source) == ["link.bin"]
    fd = source.files[0].open()
    assert os.read(fd, 9) == b"2"
    os.close(fd)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("outputs/nix", r"has no file or folder 'outputs/nix'\. Its files: outputs/best\.bin, outputs/model/a\."),
        ("/etc/passwd", r"'/etc/passwd' is not a file of run .* leaves the run's folder.* --run RUN\)"),
        ("../../other", "leaves the run's folder"),
        ("", "is not a file of run"),
        ("job.json", "has no file or folder 'job.json'"),
        ("outputs/out", "is behind a link that leads out of the run, and no file of the run's"),
        ("outputs/pipe", "is a pipe, and no file of the run's"),
        ("outputs/empty", "there is no file in the folder 'outputs/empty'"),
        (
            "outputs/bad",
            r"outputs/bad/out of run .* is a link that leads out of the run, .*: a model keeps files alone",
        ),
        ("outputs/bad2", r"outputs/bad2/pipe of run .* is a pipe: a model keeps files alone"),
    ],
)
def test_model_path_that_is_missing_or_outside_the_run_is_refused(folder, tmp_path, name, said):
    write_tree(tmp_path, {"secret": "1"})
    for place in ("empty", "bad", "bad2"):
        (folder.outputs / place).mkdir()
    for place in ("out", "bad/out"):
        (folder.outputs / place).symlink_to(tmp_path / "secret")
    for place in ("pipe", "bad2/pipe"):
        os.mkfifo(folder.outputs / place)
    with pytest.raises(ModelError, match=said):
        sources.of_run(folder, name)


def test_run_file_replaced_by_a_symlink_is_not_opened(folder, tmp_path):
    (file,) = sources.of_run(folder, "outputs/best.bin").files
    (folder.outputs / "best.bin").unlink()
    (folder.outputs / "best.bin").symlink_to(write_tree(tmp_path, {"secret": "1"}) / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        file.open()
