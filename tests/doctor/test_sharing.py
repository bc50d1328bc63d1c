"""Folders that nodes share, or do not."""

from __future__ import annotations

import os

import pytest

from paceline.doctor import sharing
from paceline.doctor.sharing import check_sharing


@pytest.fixture
def shared(examination, two, tmp_path, monkeypatch):
    """The findings, with these nodes on file systems of their own."""
    monkeypatch.setattr(sharing, "_LOOK_AGAIN_S", 0.0)

    def check(*own):
        examination.folder = str(tmp_path / "runs folder")
        for link in two:
            if link.name in own:
                link.root = str(tmp_path / link.name)
        return list(check_sharing(examination))

    return check


def test_sharing_check_passes_if_all_nodes_see_the_same_folders(shared, examination):
    folder, workspace = shared()
    assert (folder.level, folder.seen) == ("ok", f"{examination.folder} is shared by all nodes")
    assert (workspace.level, workspace.seen) == ("ok", f"{examination.workspace_dir} is shared by all nodes")
    assert not os.path.exists(examination.folder), "the folder was not there before"
    assert os.listdir(examination.workspace_dir) == []


def test_nodes_with_separate_disks_pass_the_sharing_check(shared, examination):
    folder, workspace = shared("node0", "node1")
    assert (folder.level, "each node's own" in folder.seen) == ("ok", True)
    assert (workspace.level, "this machine's own" in workspace.seen) == ("ok", True)


def test_sharing_check_warns_if_only_some_nodes_share_the_workspace(shared, examination):
    _, workspace = shared("node1")
    assert workspace.level == "warn"
    assert workspace.seen == f"{examination.workspace_dir} is shared by node0, but not by node1"
    assert "Mount it on all nodes" in workspace.advice


def test_unwritable_folder_fails_the_sharing_check(shared, two):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied", path)

    two[0].put_file = refuse
    folder, _ = shared()
    assert (folder.level, folder.node) == ("fail", "node0")
    assert "Permission denied" in folder.seen
