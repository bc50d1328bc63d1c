from __future__ import annotations

import os
import socket

import pytest

from paceline.errors import SnapshotError
from paceline.snapshot import scan as scan_module
from paceline.snapshot.scan import LIMIT_VARIABLE, scan
from tests.helpers import write_tree


def scanned(top):
    return scan(top, top.parent / "cache.json", top.parent / "workspace")


def test_scan_distinguishes_files_folders_and_symlinks(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "12", "d/b": ""})
    (top / "empty/inner").mkdir(parents=True)
    (top / "l").symlink_to("a")
    tree = scanned(top)
    assert set(tree.files) == {"a", "d/b"}
    assert tree.links == {"l": "a"}
    assert set(tree.directories) == {"d", "empty", "empty/inner"}
    assert tree.size == 2


# --- Symbolic links


@pytest.mark.parametrize("target", ["a", "./a", "../code/d/../a", "nowhere", ".", "d"])
def test_relative_link_inside_the_tree_is_included(tmp_path, target):
    top = write_tree(tmp_path / "code", {"a": "", "d/b": ""})
    (top / "l").symlink_to(target)
    assert "l" in scanned(top).links


def test_an_absolute_link_inside_the_tree_becomes_relative(tmp_path):
    # Unchanged, the link would lead from the copy back to the original.
    top = write_tree(tmp_path / "code", {"a": "", "d/b": ""})
    (top / "d/l").symlink_to(top / "a")
    assert scanned(top).links == {"d/l": "../a"}


@pytest.mark.promise("services-packages-links-out-tree")
@pytest.mark.parametrize("target", ["/etc/passwd", "/", "../../outside", "../d/../../outside"])
def test_a_link_out_of_the_tree_is_refused_with_its_name_and_target(tmp_path, target):
    top = write_tree(tmp_path / "code", {"d/b": ""})
    write_tree(tmp_path, {"outside": ""})
    (top / "d/l").symlink_to(target)
    with pytest.raises(SnapshotError) as refused:
        scanned(top)
    assert f"'d/l' is a link to {target!r}, outside" in str(refused.value)
    assert ".amlignore" in str(refused.value)


def test_symlink_chain_to_outside_is_refused(tmp_path):
    top = write_tree(tmp_path / "code", {".gitignore": "hop\n"})
    (top / "hop").symlink_to("..")
    (top / "l").symlink_to("hop/code2/a")
    with pytest.raises(SnapshotError, match="'l' is a link to 'hop/code2/a', outside"):
        scanned(top)


def test_link_to_a_sibling_folder_with_a_similar_name_is_refused(tmp_path):
    top = write_tree(tmp_path / "code", {"a": ""})
    write_tree(tmp_path / "code2", {"a": ""})
    (top / "l").symlink_to("../code2/a")
    with pytest.raises(SnapshotError, match="outside"):
        scanned(top)


def test_ignored_link_out_of_the_source_is_accepted(tmp_path):
    top = write_tree(tmp_path / "code", {".gitignore": "/data\n", "a": ""})
    (top / "data").symlink_to("/etc")
    assert scanned(top).links == {}


def test_source_folder_may_be_a_symlink(tmp_path):
    write_tree(tmp_path / "real", {"a": ""})
    (tmp_path / "code").symlink_to("real")
    (tmp_path / "real/l").symlink_to(tmp_path / "code/a")
    tree = scanned(tmp_path / "code")
    assert (set(tree.files), tree.links) == ({"a"}, {"l": "a"})


# --- Folders that can't be a source folder


@pytest.mark.promise("services-packages-links-out-tree")
def test_pipe_in_the_source_is_refused(tmp_path):
    top = write_tree(tmp_path / "code", {"a": ""})
    os.mkfifo(top / "pipe")
    with pytest.raises(SnapshotError, match="'pipe' is neither a file, a folder nor a link"):
        scanned(top)


def test_socket_in_the_source_is_refused(tmp_path, monkeypatch):
    top = write_tree(tmp_path / "code", {"a": ""})
    monkeypatch.chdir(top)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        with pytest.raises(SnapshotError, match="'s' is neither"):
            scanned(top)


def test_ignored_pipe_is_accepted(tmp_path):
    top = write_tree(tmp_path / "code", {".gitignore": "pipe\n"})
    os.mkfifo(top / "pipe")
    assert set(scanned(top).files) == {".gitignore"}


@pytest.mark.parametrize("name", ["venv", ".venv", "deep/env"])
def test_virtual_environment_in_the_source_is_excluded_from_the_scan(tmp_path, name):
    top = write_tree(tmp_path / "code", {f"{name}/pyvenv.cfg": "", f"{name}/lib/a.py": "", "a.py": ""})
    assert set(scanned(top).files) == {"a.py"}


@pytest.mark.parametrize("place", ["workspace", "deep/workspace"])
def test_workspace_inside_the_source_is_excluded_from_the_scan(tmp_path, place):
    top = write_tree(tmp_path / "code", {f"{place}/runs/a": "", "workspaces/a": ""})
    (tmp_path / "link").symlink_to(top / place)
    tree = scan(top, tmp_path / "cache.json", tmp_path / "link")
    assert set(tree.files) == {"workspaces/a"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder_in_the_source_raises_an_error_with_the_name_of_the_folder(tmp_path):
    top = write_tree(tmp_path / "code", {"d/a": ""})
    (top / "d").chmod(0)
    try:
        with pytest.raises(SnapshotError, match="folder 'd'"):
            scanned(top)
    finally:
        (top / "d").chmod(0o755)


# --- Limits on the number and size of files


def test_too_many_files_are_refused_with_the_largest_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "MAX_FILES", 5)
    top = write_tree(tmp_path / "code", {**{f"many/{i}": "" for i in range(4)}, "few/a": "", "one": ""})
    with pytest.raises(SnapshotError) as refused:
        scanned(top)
    assert "in 6 files; a snapshot takes 300 MiB and 5 files" in str(refused.value)
    assert "'many' (0 MiB, 4 files), 'few' (0 MiB, 1 files)" in str(refused.value)
    assert ".amlignore" in str(refused.value)
    assert f"{LIMIT_VARIABLE}=off" in str(refused.value)


@pytest.mark.promise("limits-300-mib-2-000")
def test_snapshot_over_the_size_limit_is_refused_and_the_error_names_the_largest_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "MAX_BYTES", 3 << 20)
    top = write_tree(
        tmp_path / "code", {"small": b"0" * (1 << 20), "data/large": b"0" * (3 << 20), "a/b": "", "a/c": ""}
    )
    with pytest.raises(SnapshotError) as refused:
        scanned(top)
    assert "holds 4 MiB in 4 files; a snapshot takes 3 MiB" in str(refused.value)
    assert "'data' (3 MiB, 1 files), 'small' (1 MiB, 1 files)" in str(refused.value)


def test_symlinks_count_towards_the_limit_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "MAX_FILES", 2)
    top = write_tree(tmp_path / "code", {"a": ""})
    for name in ("l", "m"):
        (top / name).symlink_to("a")
    with pytest.raises(SnapshotError, match="in 3 files"):
        scanned(top)


def test_tree_exactly_at_its_limits_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "MAX_FILES", 2)
    monkeypatch.setattr(scan_module, "MAX_BYTES", 10)
    assert scanned(write_tree(tmp_path / "code", {"a": "12345", "b": "12345"})).size == 10


@pytest.mark.parametrize(
    ("name", "value"), [(LIMIT_VARIABLE, "off"), (LIMIT_VARIABLE, "OFF"), ("AML_SNAPSHOT_NO_FILE_LIMIT", "1")]
)
def test_environment_variable_lifts_the_snapshot_limits_of_files_and_bytes(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(scan_module, "MAX_FILES", 1)
    monkeypatch.setattr(scan_module, "MAX_BYTES", 1)
    monkeypatch.setenv(name, value)
    assert scanned(write_tree(tmp_path / "code", {"a": "12345", "b": "12345"})).size == 10


def test_ignored_files_are_excluded_from_the_limit_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "MAX_FILES", 1)
    files = {".gitignore": "data/\n", "data/a": "", "data/b": ""}
    assert set(scanned(write_tree(tmp_path / "code", files)).files) == {".gitignore"}


@pytest.mark.promise("limits-300-mib-2-000")
def test_default_limits_are_those_of_the_azure_sdk():
    assert (scan_module.MAX_BYTES, scan_module.MAX_FILES) == (300 * 1024 * 1024, 2000)
