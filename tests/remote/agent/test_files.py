from __future__ import annotations

import os
import stat

import pytest

from paceline.remote.agent.files import AtomicWrite, census, remove
from tests.helpers import write_tree


def entry(name: str, kind: str = "file", **values):
    return {"name": name, "kind": kind, "mode": 0o640, "mtime": 1_600_000_000_123_456_789, "end": True} | values


def bring(path, how: str = "replace") -> None:
    arrival = AtomicWrite(str(path), how)
    arrival.take(entry(".", "dir", mode=0o755), b"")
    arrival.take(entry("d", "dir", mode=0o555), b"")
    arrival.take(entry("d/a b\n\udcff", end=False), b"one ")
    arrival.take({"name": "d/a b\n\udcff", "kind": "more", "end": True}, b"two")
    arrival.take({"name": "link", "kind": "link", "target": "d/nowhere"}, b"")
    arrival.finish()


def test_received_tree_keeps_modes_times_and_links(tmp_path):
    bring(tmp_path / "new/tree")
    found = os.stat(tmp_path / "new/tree/d/a b\n\udcff")
    assert (tmp_path / "new/tree/d/a b\n\udcff").read_bytes() == b"one two"
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o640, 1_600_000_000_123_456_789)
    assert os.readlink(tmp_path / "new/tree/link") == "d/nowhere"
    assert stat.S_IMODE(os.stat(tmp_path / "new/tree/d").st_mode) == 0o555
    assert census(str(tmp_path / "new/tree")) == (2, 7 + len("d/nowhere"))
    assert os.listdir(tmp_path / "new") == ["tree"]
    remove(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_remove_deletes_a_file_or_a_symlink_but_not_the_folder_a_symlink_points_to(tmp_path):
    # Regression: `remove` did not delete the test file of `paceline doctor`, so each call left another file on the
    # first node.
    write_tree(tmp_path, {"tree/kept": "x", "file": "y"})
    os.symlink(tmp_path / "tree", tmp_path / "link")
    for name in ("file", "link", "nothing"):
        remove(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["tree"]
    assert os.listdir(tmp_path / "tree") == ["kept"]


@pytest.mark.parametrize(
    ("how", "left"), [("keep", ["mine"]), ("replace", ["d", "link"]), ("merge", ["d", "link", "mine"])]
)
def test_existing_folder_is_kept_replaced_or_merged_as_requested_when_a_tree_is_received(tmp_path, how, left):
    write_tree(tmp_path / "tree", {"mine": "x"})
    bring(tmp_path / "tree", how)
    assert sorted(os.listdir(tmp_path / "tree")) == left
    assert os.listdir(tmp_path) == ["tree"]


@pytest.mark.parametrize("how", ["keep", "replace", "merge"])
def test_interrupted_write_leaves_no_files(tmp_path, how):
    write_tree(tmp_path / "tree", {"mine": "x"})
    arrival = AtomicWrite(str(tmp_path / "tree"), how)
    arrival.take(entry(".", "dir", mode=0o755), b"")
    arrival.take(entry("half", end=False), b"one")
    arrival.drop()
    assert [sorted(os.listdir(path)) for path in (tmp_path, tmp_path / "tree")] == [["tree"], ["mine"]]


def test_file_name_of_maximal_length_is_received(tmp_path):
    for how in ("replace", "merge"):
        arrival = AtomicWrite(str(tmp_path / "tree"), how)
        arrival.take(entry(".", "dir", mode=0o755), b"")
        arrival.take(entry("x" * 255), b"y")
        arrival.finish()
        assert (tmp_path / "tree" / ("x" * 255)).read_bytes() == b"y"
