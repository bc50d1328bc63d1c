from __future__ import annotations

import os
from dataclasses import replace

import pytest

from paceline.runs import excluded_files, work_dir
from paceline.runs.folder import RunFolder
from paceline.system.files import append_line
from tests.helpers import make_record, write_tree


@pytest.fixture
def folder(tmp_path):
    top = tmp_path / "runs/digits_1_1"
    write_tree(top, {"outputs/a": "1", "checkpoints/9.pt": "nine", "work/w": "w", "work/d/x": "x", "uploads/o/y": "y"})
    (top / "work/outputs").symlink_to("../outputs")
    return RunFolder(top)


def names(folder):
    return {one["name"]: one["why"] for one in excluded_files.find(folder)}


def test_special_files_and_outside_links_are_listed_with_the_reason(folder):
    (folder.outputs / "etc").symlink_to("/etc")
    (folder.checkpoints / "latest").symlink_to("gone")
    (folder.outputs / "best").symlink_to("../checkpoints/9.pt")
    os.mkfifo(folder.outputs / "pipe")
    assert names(folder) == {
        "checkpoints/latest": "a link to 'gone', where there is nothing",
        "outputs/etc": "a link that leads out of the run, to '/etc'",
        "outputs/pipe": "a pipe",
    }


def test_file_excluded_on_a_node_is_listed_until_it_exists_in_the_run_folder(folder):
    for name in ("outputs/etc", "uploads/o/pipe", "outputs/a"):
        append_line(folder.left_out, {"name": name, "why": "a pipe"})
    assert sorted(names(folder)) == ["outputs/etc", "uploads/o/pipe"]


def test_outputs_folder_replaced_by_a_link_is_reported(folder, tmp_path):
    (folder.work / "outputs").unlink()
    (folder.work / "outputs").symlink_to(tmp_path)
    assert names(folder) == {"work/outputs": f"a link in the place of the run's outputs, to {str(tmp_path)!r}"}


def test_output_symlinks_to_files_in_the_working_folder_are_replaced_by_copies(folder):
    (folder.outputs / "w").symlink_to("../work/w")
    (folder.outputs / "d").symlink_to(folder.work / "d")
    (folder.checkpoints / "y").symlink_to("../uploads/o/y")
    (folder.work / "d/best").symlink_to("../../checkpoints/9.pt")
    (folder.work / "d/etc").symlink_to("/etc")
    (folder.outputs / "best").symlink_to("../checkpoints/9.pt")
    folder.artifacts.symlink_to("work/d")
    excluded_files.settle(folder)
    assert not (folder.outputs / "w").is_symlink()
    assert not folder.artifacts.is_symlink()
    assert (folder.outputs / "best").is_symlink()
    for path in (folder.work, folder.uploads):
        path.rename(path.with_name(f"{path.name}-gone"))
    assert (folder.outputs / "w").read_text() + (folder.checkpoints / "y").read_text() == "wy"
    assert {path.name: path.read_text() for path in (folder.outputs / "d").iterdir()} == {"x": "x", "best": "nine"}
    assert sorted(path.name for path in folder.outputs.iterdir()) == ["a", "best", "d", "w"]


def test_output_symlink_through_the_work_dir_still_resolves_after_the_work_dir_is_removed(folder):
    # A script that calls `os.symlink(os.path.abspath("outputs/step"), "outputs/latest")` makes such a link.
    write_tree(folder.outputs, {"step/b": "2"})
    (folder.outputs / "latest").symlink_to(folder.work / "outputs/step")
    (folder.checkpoints / "b").symlink_to("../work/outputs/step/b")
    (folder.outputs / "plain").symlink_to("./step")
    excluded_files.settle(folder)
    folder.work.rename(folder.path / "gone")
    assert (folder.outputs / "latest").readlink().name == "step"
    found = (folder.outputs / "latest/b", folder.checkpoints / "b", folder.outputs / "plain/b")
    assert [path.read_text() for path in found] == ["2", "2", "2"]
    assert sorted(path.name for path in folder.outputs.iterdir()) == ["a", "latest", "plain", "step"]
    assert names(folder) == {}


def test_symlink_in_an_outputs_folder_recreated_by_the_script_is_moved_to_the_run_outputs(folder):
    (folder.work / "outputs").unlink()
    write_tree(folder.work, {"outputs/step/b": "2"})
    (folder.work / "outputs/latest").symlink_to("step")
    work_dir.rescue_outputs(folder)
    assert ((folder.outputs / "latest").readlink().name, (folder.outputs / "latest/b").read_text()) == ("step", "2")


@pytest.mark.parametrize("place", ["outputs", "outputs/esc", "work"])
def test_moving_outputs_writes_nothing_through_a_run_folder_replaced_by_a_symlink(folder, tmp_path, place):
    """As a script in a container may try, which can't write where its supervisor can."""
    theirs = write_tree(tmp_path / "home", {"outputs/esc/old": "mine"})
    (folder.work / "outputs").unlink()
    write_tree(folder.work, {"outputs/esc/key": "theirs", "outputs/new": "theirs"})
    target = folder.path / place
    if target.exists():
        target.rename(tmp_path / "away")
    target.symlink_to(theirs)
    work_dir.rescue_outputs(folder)
    work_dir.clean(folder)
    excluded_files.settle(folder)
    assert [str(path.relative_to(theirs)) for path in theirs.rglob("*") if path.is_file()] == ["outputs/esc/old"]
    assert not list(folder.path.glob("outputs/**/old")) or place == "outputs"


def test_summary_names_some_excluded_files_and_counts_further_ones():
    record = make_record()
    assert excluded_files.lines(record) == []
    found = tuple({"name": f"outputs/{n}", "why": "a pipe"} for n in range(7))
    record = replace(record, left_out=found, left_out_count=9)
    assert excluded_files.lines(record) == [
        *(f"'outputs/{n}' is a pipe" for n in range(5)),
        f"and 4 more: paceline show {record.run_id} --json",
    ]
    assert len(excluded_files.lines(replace(record, left_out_count=7), limit=100)) == 7
