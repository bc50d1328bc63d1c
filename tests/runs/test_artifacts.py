from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from paceline.errors import FileNameError, RunNotFoundError, RunStateError, UserError
from paceline.runs import artifacts
from paceline.runs.folder import RunFolder
from tests.helpers import start_python, write_tree


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs/digits_1_1")
    for part in (folder.outputs, folder.logs):
        part.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "outputs/model.pt",
        "outputs/a/b/c",
        "plot.png",
        "a b/ü'\n",
        "logs/extra.log",
        "-x",
        "state.json",
        "x" * 255,
        "😀" * 63,
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_uploaded_file_is_listed_and_downloaded_unchanged_under_its_name(folder, tmp_path, name):
    (tmp_path / "source").write_bytes(b"\0data")
    assert artifacts.put(folder, name, tmp_path / "source") == name
    assert artifacts.names(folder) == [name]
    assert Path(artifacts.get(folder, name, "copy")).read_bytes() == b"\0data"


@pytest.mark.parametrize("name", ["../x", "/x", "outputs/../../x", "", "a\0", ".."])
def test_file_name_outside_the_run_is_refused_by_upload_and_download(folder, tmp_path, name):
    (tmp_path / "source").write_text("")
    for call in (
        lambda: artifacts.put(folder, name, tmp_path / "source"),
        lambda: artifacts.put_folder(folder, name, tmp_path),
        lambda: artifacts.get(folder, name),
    ):
        with pytest.raises(FileNameError):
            call()


@pytest.mark.promise("name-taken-other-bytes-refused")
def test_file_with_equal_bytes_may_be_uploaded_again_under_its_name(folder, tmp_path):
    for content in ("same", "same"):
        (tmp_path / "source").write_text(content)
        artifacts.put(folder, "outputs/a", tmp_path / "source")
    assert artifacts.names(folder) == ["outputs/a"]


@pytest.mark.promise("name-taken-other-bytes-refused")
def test_upload_of_other_content_under_an_existing_name_is_refused(folder, tmp_path):
    artifacts.put(folder, "outputs/a", io.BytesIO(b"first"))
    with pytest.raises(RunStateError, match="another file 'outputs/a' already"):
        artifacts.put(folder, "outputs/a", io.BytesIO(b"other"))
    assert (folder.outputs / "a").read_text() == "first"
    assert os.listdir(folder.outputs) == ["a"]


def test_uploading_an_output_file_under_its_own_name_keeps_the_file(folder):
    (folder.outputs / "a").write_text("x")
    assert artifacts.put(folder, "outputs/a", folder.outputs / "a") == "outputs/a"
    assert (folder.outputs / "a").read_text() == "x"


def test_upload_of_an_open_stream_starts_at_its_position(folder):
    stream = io.BytesIO(b"head body")
    stream.read(5)
    artifacts.put(folder, "a", stream)
    assert folder.file("a").read_bytes() == b"body"


def test_failed_upload_of_a_stream_leaves_no_file(folder):
    class Broken(io.BytesIO):
        def read(self, *arguments):
            raise OSError("cable pulled")

    with pytest.raises(OSError, match="cable pulled"):
        artifacts.put(folder, "outputs/a", Broken())
    assert artifacts.names(folder) == []


@pytest.mark.parametrize("source", ["nowhere", "."])
def test_upload_of_a_path_that_is_no_regular_file_is_refused(folder, source):
    with pytest.raises(UserError, match="is not a file"):
        artifacts.put(folder, "a", source)


def test_upload_under_the_name_of_an_existing_folder_is_refused(folder):
    artifacts.put(folder, "d/a", io.BytesIO(b"x"))
    with pytest.raises(RunStateError, match="another file 'd'"):
        artifacts.put(folder, "d", io.BytesIO(b"x"))


def test_concurrent_uploads_of_one_name_let_one_rank_succeed(folder):
    code = """
import io, sys
from pathlib import Path
from paceline.errors import RunStateError
from paceline.runs import artifacts
from paceline.runs.folder import RunFolder
won = 0
for number in range(50):
    try: artifacts.put(RunFolder(Path(sys.argv[1])), f"outputs/{number}", io.BytesIO(sys.argv[2].encode() * 1000)); won += 1
    except RunStateError: pass
print(won)
"""
    started = [start_python(code, folder.path, name) for name in "abc"]
    assert sum(int(process.communicate()[0]) for process in started) == 50
    assert len(artifacts.names(folder)) == 50
    assert all(len(set((folder.outputs / str(number)).read_text())) == 1 for number in range(50))


def test_folder_upload_keeps_relative_paths(folder, tmp_path):
    source = write_tree(tmp_path / "source", {"a": "1", "d/e/b": "2", ".hidden": "3"})
    assert artifacts.put_folder(folder, "plots/", source) == ["plots/.hidden", "plots/a", "plots/d/e/b"]
    assert artifacts.names(folder) == ["plots/.hidden", "plots/a", "plots/d/e/b"]


@pytest.mark.parametrize("source", ["nowhere", "file"])
def test_folder_upload_of_a_missing_path_or_of_a_file_is_refused(folder, tmp_path, source):
    write_tree(tmp_path, {"file": ""})
    with pytest.raises(UserError, match="is not a folder"):
        artifacts.put_folder(folder, "plots", tmp_path / source)


def test_file_names_of_outputs_logs_and_uploads_are_sorted_together(folder):
    write_tree(folder.path, {"outputs/b": "", "logs/driver.log": "", "state.json": "", "metrics/rank_0.jsonl": ""})
    for name in ("z", "a", "outputs/a"):
        artifacts.put(folder, name, io.BytesIO(b""))
    assert artifacts.names(folder) == ["a", "logs/driver.log", "outputs/a", "outputs/b", "z"]


@pytest.mark.parametrize(
    ("target", "written"),
    [
        (None, "model.pt"),
        ("copy.pt", "copy.pt"),
        ("new/copy.pt", "new/copy.pt"),
        ("there", "there/model.pt"),
        ("new/", "new/model.pt"),
    ],
)
def test_file_is_downloaded_into_a_target_folder_under_its_name_or_else_to_the_target_path(
    folder, tmp_path, target, written
):
    artifacts.put(folder, "outputs/model.pt", io.BytesIO(b"x"))
    (tmp_path / "there").mkdir()
    assert artifacts.get(folder, "outputs/model.pt", target) == written
    assert (tmp_path / written).read_bytes() == b"x"


def test_download_of_a_missing_file_raises_an_error_that_lists_the_existing_files(folder):
    with pytest.raises(RunNotFoundError, match=r"no file 'a'. Its files: none"):
        artifacts.get(folder, "a")
    artifacts.put(folder, "b", io.BytesIO(b""))
    with pytest.raises(LookupError, match=r"no file 'a'. Its files: b"):
        artifacts.get(folder, "a")


def test_upload_does_not_follow_symlinks_out_of_the_run(folder, tmp_path):
    (tmp_path / "out").mkdir()
    (folder.outputs / "esc").symlink_to(tmp_path / "out")
    folder.artifacts.symlink_to(tmp_path / "out")
    for name in ("outputs/esc/x", "outputs/esc/deep/x", "plain", "images/x"):
        with pytest.raises(FileNameError, match="through a link, which leads out of the run's files, to"):
            artifacts.put(folder, name, io.BytesIO(b"x"))
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("target", ["../../state.json", "/tmp/paceline-test-nothing", "OUT"])
def test_upload_over_a_symlink_is_refused(folder, tmp_path, target):
    (tmp_path / "out").write_text("x")
    (folder.outputs / "x").symlink_to(target.replace("OUT", str(tmp_path / "out")))
    with pytest.raises(RunStateError, match="another file 'outputs/x' already"):
        artifacts.put(folder, "outputs/x", io.BytesIO(b"x"))
    assert os.listdir(folder.outputs) == ["x"]
    assert (tmp_path / "out").read_text() == "x"


def test_upload_download_and_file_list_follow_symlinks_inside_the_run(folder, tmp_path):
    write_tree(folder.path, {"outputs/step/a": "1", "checkpoints/9.pt": "nine"})
    (folder.outputs / "latest").symlink_to("step")
    (folder.outputs / "best.pt").symlink_to(folder.checkpoints / "9.pt")
    artifacts.put(folder, "outputs/latest/b", io.BytesIO(b"2"))
    assert (folder.outputs / "step/b").read_text() == "2"
    assert artifacts.put(folder, "outputs/best.pt", folder.checkpoints / "9.pt") == "outputs/best.pt"
    assert artifacts.names(folder) == [
        "outputs/best.pt",
        *(f"outputs/{name}/{part}" for name in ("latest", "step") for part in ("a", "b")),
    ]
    assert Path(artifacts.get(folder, "outputs/latest/a", tmp_path / "copy")).read_text() == "1"


def test_symlink_to_outside_is_no_file_of_the_run(folder, tmp_path):
    write_tree(tmp_path, {"out/x": "secret"})
    for name, target in {"esc": tmp_path / "out", "x": tmp_path / "out/x", "gone": "nothing"}.items():
        (folder.outputs / name).symlink_to(target)
    os.mkfifo(folder.outputs / "pipe")
    assert artifacts.names(folder) == []
    for name in ("outputs/esc/x", "outputs/x"):
        with pytest.raises(RunNotFoundError, match="no file of the run's"):
            artifacts.get(folder, name, tmp_path / "copy")
    for name in ("outputs/gone", "outputs/pipe"):
        with pytest.raises(RunNotFoundError, match=f"has no file '{name}'"):
            artifacts.get(folder, name, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_folder_upload_follows_symlinks_and_uploads_nothing_if_one_is_broken(folder, tmp_path):
    top = write_tree(tmp_path, {"mine/a": "1", "other/b": "2"}) / "mine"
    (top / "linked").symlink_to(tmp_path / "other")
    (top / "up").symlink_to(".")
    assert artifacts.put_folder(folder, "all", top) == ["all/a", "all/linked/b"]
    (top / "linked/nowhere").symlink_to("nothing")
    with pytest.raises(UserError, match="is not a file: a link that leads nowhere"):
        artifacts.put_folder(folder, "again", top)
    assert artifacts.names(folder) == ["all/a", "all/linked/b"]
