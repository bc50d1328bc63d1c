"""Output folders that are left to be brought away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source
from paceline.remote.staging.stage_out import leave
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json
from tests.helpers import make_run, write_tree

MODEL = DataReference(name="model", sources=(Source(datastore="lab", path="m"),), mode="upload")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    return found


def texts(top: Path) -> dict[str, str]:
    assert not any(path.is_symlink() for path in top.rglob("*"))
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


def test_symlinks_become_files_and_special_files_are_excluded(folder: RunFolder, tmp_path: Path) -> None:
    top = write_tree(folder.uploads / "model", {"a.pt": "one", "deep/b.pt": "three"})
    work = write_tree(folder.work, {"c.pt": "elsewhere", "d/e.pt": "below"})
    (top / "out").symlink_to(write_tree(tmp_path / "out", {"a": "not the run's"}))
    (top / "link.pt").symlink_to(work / "c.pt")
    (top / "folder").symlink_to(work / "d")
    (top / "nowhere").symlink_to("gone")
    os.mkfifo(top / "pipe")
    said: list[str] = []

    left_out = leave(MODEL, folder, said.append)

    assert texts(top) == {"a.pt": "one", "deep/b.pt": "three", "link.pt": "elsewhere", "folder/e.pt": "below"}
    assert read_json(folder.left) == {"model": {"a.pt": 3, "deep/b.pt": 5, "link.pt": 9, "folder/e.pt": 5}}
    assert (work / "c.pt").read_text() == "elsewhere"
    assert [line for line in said if "left out" in line] == [
        "output 'model': 'nowhere' is a link to 'gone', where there is nothing, and is left out",
        f"output 'model': 'out' is a link that leads out of the run, to {str(tmp_path / 'out')!r}, and is left out",
        "output 'model': 'pipe' is a pipe, and is left out",
    ]
    assert [name for name, _ in left_out] == ["nowhere", "out", "pipe"]
    assert os.listdir(folder.uploads) == ["model"]


def test_sizes_of_several_outputs_are_recorded(folder: RunFolder) -> None:
    for name in ("model", "other"):
        write_tree(folder.uploads / name, {"a": "x"})
        leave(DataReference(name=name, sources=MODEL.sources, mode="upload"), folder, lambda text: None)
    assert read_json(folder.left) == {"model": {"a": 1}, "other": {"a": 1}}


def test_invalid_output_name_fails_on_the_machine_of_the_run(folder: RunFolder) -> None:
    (folder.uploads / "model").mkdir(parents=True)
    (folder.uploads / "model" / os.fsdecode(b"\xff")).touch()
    with pytest.raises(DataError, match="is not UTF-8"):
        leave(MODEL, folder, lambda text: None)
    assert not folder.left.exists()


def test_symlinked_output_folder_is_not_followed(folder: RunFolder, tmp_path: Path) -> None:
    write_tree(tmp_path / "out", {"a": "not the run's"})
    folder.uploads.mkdir()
    (folder.uploads / "model").symlink_to(tmp_path / "out")
    assert [name for name, _ in leave(MODEL, folder, lambda text: None)] == ["."]
    assert read_json(folder.left) == {"model": {}}
    assert texts(folder.uploads) == {}
    assert texts(tmp_path / "out") == {"a": "not the run's"}
