from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import RunNotFoundError, RunStateError
from paceline.runs import artifacts, downloads
from paceline.runs.folder import RunFolder
from paceline.system import files
from tests.helpers import write_tree


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with outputs, logs and an uploaded file; and with things that are no files."""
    folder = RunFolder(tmp_path / "runs" / "digits_1_1")
    write_tree(
        folder.path,
        {
            "outputs/model.pt": b"model",
            "outputs/ckpt/a.pt": b"a",
            "outputs/ckpt/b.txt": b"bb",
            "logs/rank_0.log": b"line\n",
            "artifacts/plot[1].png": b"png",
            "checkpoints/not.pt": b"",
        },
    )
    os.mkfifo(folder.outputs / "pipe")
    (folder.outputs / "nowhere").symlink_to("gone")
    (folder.outputs / "latest").symlink_to("model.pt")
    return folder


ALL = [
    "logs/rank_0.log",
    "outputs/ckpt/a.pt",
    "outputs/ckpt/b.txt",
    "outputs/latest",
    "outputs/model.pt",
    "plot[1].png",
]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], ALL),
        (["outputs/model.pt"], ["outputs/model.pt"]),
        (["./outputs/ckpt/"], ["outputs/ckpt/a.pt", "outputs/ckpt/b.txt"]),
        (["*.pt"], ["outputs/ckpt/a.pt", "outputs/model.pt"]),
        (["outputs/*.pt"], ["outputs/ckpt/a.pt", "outputs/model.pt"]),
        (["outputs/*/?.*"], ["outputs/ckpt/a.pt", "outputs/ckpt/b.txt"]),
        (["a.pt", "logs"], ["logs/rank_0.log", "outputs/ckpt/a.pt"]),
        (["plot[1].png"], ["plot[1].png"]),
        (["[lo]*"], ALL[:5]),
    ],
    ids=repr,
)
def test_downloads_are_selected_by_name_folder_and_pattern(folder, patterns, names):
    assert [file.name for file in downloads.files(folder, patterns)] == names


def test_download_excludes_and_lists_special_files(folder):
    assert artifacts.left_out(folder) == ["outputs/nowhere", "outputs/pipe"]


def test_download_pattern_without_a_match_raises_an_error_with_the_existing_files(folder):
    said = r"no file 'outputs/\*\.bin'\. Did you mean 'outputs/model\.pt'\? Its files: logs/rank_0.log.* and 1 more"
    with pytest.raises(RunNotFoundError, match=said):
        downloads.files(folder, ["*.pt", "outputs/*.bin"])


def test_downloaded_files_keep_their_names_modification_times_and_modes(folder, tmp_path):
    os.utime(folder.outputs / "model.pt", (1, 2))
    os.chmod(folder.outputs / "model.pt", 0o750)
    told: list[tuple[int, int]] = []
    done = downloads.download(downloads.files(folder), tmp_path / "to", came=lambda *now: told.append(now))

    assert [file.name for file in done.copied] == ALL
    found = {os.path.relpath(path, tmp_path / "to") for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert found == set(ALL)
    model = tmp_path / "to/outputs/model.pt"
    assert (model.read_bytes(), model.stat().st_mtime, model.stat().st_mode & 0o777) == (b"model", 2, 0o750)
    assert not (tmp_path / "to/outputs/latest").is_symlink()
    assert [sum(column) for column in zip(*told, strict=True)] == [sum(f.size_bytes for f in done.copied), len(ALL)]


def test_existing_files_are_replaced_only_with_overwrite(folder, tmp_path):
    target = write_tree(tmp_path / "to", {"outputs/model.pt": b"mine", "outputs/ckpt/a.pt": b"a"})
    chosen = downloads.files(folder)
    with pytest.raises(RunStateError, match=r"other files of this name: outputs/model\.pt\. --overwrite"):
        downloads.download(chosen, target)
    assert sorted(path.name for path in target.rglob("*.*")) == ["a.pt", "model.pt"]
    assert (target / "outputs/model.pt").read_bytes() == b"mine"

    done = downloads.download(chosen, target, overwrite=True)
    assert [file.name for file in done.same] == ["outputs/ckpt/a.pt"]
    assert (target / "outputs/model.pt").read_bytes() == b"model"
    again = downloads.download(chosen, target)
    assert (again.copied, len(again.same)) == ([], len(ALL))


def test_file_removed_during_download_is_reported_as_gone(folder, tmp_path):
    chosen = downloads.files(folder, ["*.pt"])
    (folder.outputs / "model.pt").unlink()
    done = downloads.download(chosen, tmp_path / "to")
    assert ([file.name for file in done.copied], [file.name for file in done.gone]) == (
        ["outputs/ckpt/a.pt"],
        ["outputs/model.pt"],
    )


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_download_that_fails_on_a_full_disk_keeps_the_existing_file(folder, tmp_path, monkeypatch, has_unnamed_files):
    if not has_unnamed_files:
        monkeypatch.setattr(files.os, "O_TMPFILE", 0)
    target = write_tree(tmp_path / "to", {"model.pt": b"mine"})

    def fail(size: int, whole: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.copy_whole(folder.outputs / "model.pt", target / "model.pt", fail)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"model.pt": b"mine"}
    files.copy_whole(folder.outputs / "model.pt", target / "model.pt")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"model.pt": b"model"}


@pytest.mark.promise("download-killed-leaves-part-file")
def test_download_killed_during_the_copy_leaves_no_partial_file(folder, tmp_path):
    probe = tmp_path / "probe"
    probe.mkdir()
    try:
        os.close(os.open(probe, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        pytest.skip("this file system has no files without a name")
    code = """
import sys, pathlib, time
from paceline.system.files import copy_whole
def wait(size, whole):
    print("half", flush=True)
    time.sleep(600)
copy_whole(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), wait)
"""
    words = [sys.executable, "-c", code, str(folder.outputs / "model.pt"), str(tmp_path / "to/model.pt")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert list((tmp_path / "to").iterdir()) == []


def test_download_finds_existing_equal_files_without_comparing_each_file_with_all_others(folder, tmp_path, monkeypatch):
    """Regression: the download compared each file with all existing files, so 20,000 files took minutes."""
    (one,) = downloads.files(folder, ["outputs/model.pt"])
    downloads.download([one], tmp_path)
    compared = []
    monkeypatch.setattr(downloads.RunFile, "__eq__", lambda mine, other: compared.append(mine) or mine is other)
    done = downloads.download([one, *downloads.files(folder)], tmp_path)
    assert ([file.name for file in done.same], len(done.copied)) == (["outputs/model.pt"] * 2, len(ALL) - 1)
    assert compared == []
