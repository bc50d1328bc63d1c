from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from paceline.runs import work_dir
from paceline.runs.folder import RunFolder
from paceline.system.files import write_json
from tests.helpers import write_tree


@pytest.fixture
def folder(tmp_path):
    """A run whose snapshot has a script, a data file, a link and an empty folder."""
    snapshot = write_tree(tmp_path / "snapshots/0", {"train.py": "print()", "d/data.csv": "1,2", "d/tool": "#!/bin/sh"})
    (snapshot / "d/tool").chmod(0o555)
    (snapshot / "link").symlink_to("d/data.csv")
    (snapshot / "empty").mkdir()
    folder = RunFolder(tmp_path / "runs/digits_1_2")
    folder.outputs.mkdir(parents=True)
    folder.snapshot.symlink_to("../../snapshots/0")
    return folder


def everything(top: Path) -> set[str]:
    return {os.fspath(path.relative_to(top)) for path in top.rglob("*")}


# --- Making a working directory


def test_work_dir_that_does_not_fit_on_the_disk_leaves_no_part(folder, monkeypatch):
    # Regression: the copied part stayed in the hidden folder `.work`, and kept the disk full.
    def fill(source, target):
        (Path(target) / "train.py").parent.mkdir(exist_ok=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(work_dir, "_copy", fill)
    with pytest.raises(OSError, match="No space"):
        work_dir.make(folder)
    assert sorted(os.listdir(folder.path)) == ["outputs", "snapshot"]


def test_work_dir_is_a_copy_of_the_snapshot_with_outputs(folder):
    work = work_dir.make(folder)
    assert work == folder.work
    assert everything(work) == {"train.py", "d", "d/data.csv", "d/tool", "link", "empty", "outputs"}
    assert (work / "link").readlink() == Path("d/data.csv")
    assert stat.S_IMODE((work / "d/tool").stat().st_mode) == 0o555
    assert (work / "train.py").stat().st_mtime_ns == (folder.snapshot / "train.py").stat().st_mtime_ns


def test_file_written_to_outputs_in_the_work_dir_appears_in_the_outputs_of_the_run(folder):
    (work_dir.make(folder) / "outputs/model").write_text("x")
    assert (folder.outputs / "model").read_text() == "x"


def test_changes_in_the_work_dir_do_not_change_the_snapshot(folder):
    work = work_dir.make(folder)
    (work / "train.py").write_text("changed")
    (work / "link").unlink()
    assert (folder.snapshot / "train.py").read_text() == "print()"
    assert (folder.snapshot / "link").is_symlink()


def test_incomplete_work_dir_is_recreated(folder):
    write_tree(folder.work, {"old": "", "train.py": "half"})
    work = work_dir.make(folder)
    assert (work / "train.py").read_text() == "print()"
    assert not (work / "old").exists()


def test_creating_a_work_dir_without_its_snapshot_raises_file_not_found(folder):
    shutil.rmtree(folder.snapshot.resolve())
    with pytest.raises(FileNotFoundError):
        work_dir.make(folder)


def test_cleaning_removes_files_given_in_the_job_definition_unless_they_were_changed(folder):
    files = {"train.py": "given", "cfg/given.json": "{}", "kept.json": "1", "link": "in its place"}
    write_json(folder.job, {"job": {"files": files}})
    work = work_dir.make(folder)
    assert {path: (work / path).read_text() for path in files} == files
    assert (work / "d/data.csv").read_text() == (folder.snapshot / "d/data.csv").read_text()
    (work / "kept.json").write_text("2")
    work_dir.clean(folder)
    assert everything(work) == {"kept.json"}


def test_file_given_in_the_job_definition_under_a_symlink_out_of_the_source_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder.snapshot / "cfg").symlink_to(tmp_path / "elsewhere")
    write_json(folder.job, {"job": {"files": {"cfg/given.json": "{}"}}})
    with pytest.raises(OSError, match="leads out of it"):
        work_dir.make(folder)
    assert not list((tmp_path / "elsewhere").iterdir())


# --- Cleaning a working directory


def test_cleaning_removes_an_unchanged_work_dir(folder):
    work_dir.make(folder)
    work_dir.clean(folder)
    assert not folder.work.exists()
    assert (folder.snapshot / "train.py").exists()
    assert folder.outputs.is_dir()


def test_cleaning_keeps_changed_and_new_files(folder):
    work = work_dir.make(folder)
    write_tree(work, {"d/data.csv": "3,4,5", "checkpoint/step_1": "w", "log.txt": ""})
    work_dir.clean(folder)
    assert everything(work) == {"d", "d/data.csv", "checkpoint", "checkpoint/step_1", "log.txt"}


def test_cleaning_keeps_a_rewritten_file_of_the_same_size(folder):
    work = work_dir.make(folder)
    (work / "d/data.csv").write_text("2,1")
    work_dir.clean(folder)
    assert (work / "d/data.csv").read_text() == "2,1"


def test_cleaning_keeps_new_and_changed_links(folder):
    work = work_dir.make(folder)
    (work / "link").unlink()
    (work / "link").symlink_to("train.py")
    (work / "new").symlink_to("nowhere")
    (work / "to-folder").symlink_to("d")
    work_dir.clean(folder)
    assert everything(work) == {"link", "new", "to-folder"}


def test_cleaning_removes_compiled_python_files(folder):
    work = work_dir.make(folder)
    write_tree(work, {"__pycache__/a.pyc": "", "d/__pycache__/b.pyc": "", "d/result": ""})
    work_dir.clean(folder)
    assert everything(work) == {"d", "d/result"}


def test_cleaning_keeps_outputs(folder):
    work = work_dir.make(folder)
    write_tree(work, {"outputs/model": "w", "outputs/train.py": "print()"})
    work_dir.clean(folder)
    assert not work.exists()
    assert everything(folder.outputs) == {"model", "train.py"}


def test_files_of_an_outputs_folder_recreated_by_the_script_are_merged_into_the_run_outputs(folder):
    (folder.outputs / "early").write_text("kept")
    work = work_dir.make(folder)
    (work / "outputs").unlink()
    write_tree(work, {"outputs/model": "w", "outputs/d/plot": "p", "outputs/early": "other"})
    work_dir.clean(folder)
    assert (folder.outputs / "model").read_text() == "w"
    assert (folder.outputs / "d/plot").read_text() == "p"
    # If two files have the same name, both are kept.
    assert (folder.outputs / "early").read_text() == "kept"
    assert (work / "outputs/early").read_text() == "other"


def test_cleaning_keeps_a_file_that_replaced_the_outputs_folder(folder):
    work = work_dir.make(folder)
    (work / "outputs").unlink()
    (work / "outputs").write_text("not a folder")
    work_dir.clean(folder)
    assert (work / "outputs").read_text() == "not a folder"


def test_cleaning_removes_a_work_dir_in_which_the_script_deleted_files(folder):
    work = work_dir.make(folder)
    (work / "train.py").unlink()
    shutil.rmtree(work / "d")
    work_dir.clean(folder)
    assert not work.exists()


def test_cleaning_a_missing_or_already_cleaned_work_dir_does_not_raise(folder):
    work_dir.clean(folder)
    work_dir.make(folder)
    work_dir.clean(folder)
    work_dir.clean(folder)


def test_cleaning_without_a_snapshot_removes_nothing(folder):
    work = work_dir.make(folder)
    shutil.rmtree(folder.snapshot.resolve())
    work_dir.clean(folder)
    assert (work / "train.py").exists()


def test_cleaning_does_not_follow_links_out_of_the_work_dir(folder, tmp_path):
    outside = write_tree(tmp_path / "outside", {"train.py": "print()", "d/data.csv": "1,2"})
    work = work_dir.make(folder)
    (work / "away").symlink_to(outside)
    shutil.rmtree(work / "d")
    (work / "d").symlink_to(outside / "d")
    work_dir.clean(folder)
    assert everything(outside) == {"train.py", "d", "d/data.csv"}


# --- Files for a machine that does not see the user's folders


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A tree that runs share: its files are read-only."""
    top = write_tree(tmp_path / "carried/0", {"x.txt": "rows", "deep/tool": "#!/bin/sh"})
    for path, mode in ((top / "x.txt", 0o444), (top / "deep/tool", 0o555)):
        path.chmod(mode)
        os.utime(path, ns=(1, 10**18 + 1))
    return top


def test_data_sent_with_a_run_is_copied_to_the_work_dir_and_removed_unless_changed(folder, carried):
    sent = {"data": carried, "d/one.txt": carried / "x.txt", "empty2": None}
    work = work_dir.make(folder, is_shared=False, sent=sent)
    assert (work / "data/x.txt").read_text() == (work / "d/one.txt").read_text() == "rows"
    assert (work / "d/data.csv").exists()
    assert (work / "empty2").is_dir()
    assert (work / "data/deep/tool").stat().st_mode & 0o777 == 0o755
    assert (work / "data/x.txt").stat().st_mtime_ns == 10**18 + 1
    (work / "data/cache.bin").write_text("new")
    (work / "data/deep/tool").write_text("changed")
    assert (carried / "deep/tool").read_text() == "#!/bin/sh"
    work_dir.clean(folder)
    assert everything(work) == {"data", "data/cache.bin", "data/deep", "data/deep/tool"}
    assert everything(carried) == {"x.txt", "deep", "deep/tool"}


def test_data_for_a_path_that_leaves_the_source_by_a_link_is_refused(folder, carried, tmp_path):
    (folder.snapshot / "away").symlink_to(tmp_path)
    with pytest.raises(OSError, match="leads out"):
        work_dir.make(folder, is_shared=False, sent={"away/x": carried})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("is_shared", [True, False])
def test_outputs_in_a_remote_work_dir_are_a_folder_and_not_a_link(folder, tmp_path, is_shared):
    source = write_tree(tmp_path / "user", {"train.py": "", "home/x": ""})
    write_json(folder.job, {"source_directory": str(source), "job": {"working_directory": "home"}, "status": "Running"})
    (folder.outputs / "old.txt").write_text("of an earlier attempt")
    work = work_dir.make(folder, is_shared=is_shared)
    at = work_dir.place(json.loads(folder.job.read_text()), is_shared=is_shared)
    outputs = work / at.outputs
    assert not outputs.is_symlink()
    assert (outputs / "old.txt").exists()
    assert (outputs / ".." / ".." / "train.py").resolve() == (work / at.copy / "train.py").resolve()
    (outputs / "a").mkdir()
    (outputs / "a/model.pt").write_text("m")
    (work / at.directory / "left.txt").write_text("l")
    work_dir.clean(folder)
    assert (folder.outputs / "a/model.pt").read_text() == "m"
    assert everything(folder.work) == {"home", "home/left.txt"}
