from __future__ import annotations

import os
import re
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SnapshotError
from paceline.snapshot import scan, store
from paceline.snapshot.ignore import Ignore
from paceline.snapshot.scan import stamp_of
from paceline.snapshot.store import Snapshot, take
from tests.helpers import start_python, write_tree


def snap(top: Path, workspace: Path | None = None) -> Snapshot:
    workspace = workspace or top.parent / "workspace"
    return take(top, workspace / "snapshots", workspace)


def contents(top: Path) -> dict[str, object]:
    """Return path -> bytes and mode, target of a link, or None for a folder: all that a snapshot must keep."""
    found: dict[str, object] = {}
    for path in top.rglob("*"):
        name = os.fspath(path.relative_to(top))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = None
        else:
            found[name] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    return found


def settle() -> None:
    """Wait until the files' times are more than a clock's tick before the next scan."""
    time.sleep(0.06)


# --- Contents of a snapshot


def test_snapshot_equals_its_source(tmp_path):
    top = write_tree(tmp_path / "code", {"train.py": "print()", "d/e/data": b"\0\xff" * 1000, "empty": ""})
    (top / "d/link").symlink_to("../train.py")
    (top / "nothing/here").mkdir(parents=True)
    taken = snap(top)
    assert contents(taken.path) == contents(top)
    assert (taken.is_new, taken.file_count, taken.size) == (True, 4, 2007)
    assert taken.path == tmp_path / "workspace/snapshots" / taken.id
    assert taken.files == {"train.py", "d/e/data", "empty", "d/link"}


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600, 0o444, 0o500])
def test_snapshot_keeps_file_modes(tmp_path, mode):
    top = write_tree(tmp_path / "code", {"a": "x"})
    (top / "a").chmod(mode)
    assert stat.S_IMODE((snap(top).path / "a").stat().st_mode) == mode


NAMES = [
    "a b",
    "new\nline",
    "größe",
    "日本",
    "'\"; rm -rf",
    "-x",
    "$(x)",
    "\\",
    "*",
    os.fsdecode(b"\xff\xfe"),
    "tab\t",
    "x" * 255,
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_snapshot_keeps_unusual_file_names(tmp_path, name):
    top = write_tree(tmp_path / "code", {f"{name}/{name}": "x", ".gitignore": "nothing\n"})
    (top / "link").symlink_to(f"{name}/{name}")
    first = snap(top)
    assert contents(first.path) == contents(top)
    settle()
    assert (snap(top).id, snap(top).is_new) == (first.id, False)


def test_links_in_a_snapshot_point_into_the_snapshot(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "old", "d/x": ""})
    (top / "relative").symlink_to("a")
    (top / "d/absolute").symlink_to(top / "a")
    # Regression: a relative link that leaves the source folder and returns into it by the folder's name was copied
    # unchanged. In the snapshot, its target did not exist.
    (top / "d/roundabout").symlink_to("../../code/a")
    copy = snap(top).path
    (top / "a").write_text("new")
    for name in ("relative", "d/absolute", "d/roundabout"):
        assert (copy / name).read_text() == "old"


@pytest.mark.promise("source-copied-uncommitted-edits-included")
def test_uncommitted_edits_are_in_the_snapshot(tmp_path):
    top = write_tree(tmp_path / "code", {"train.py": "old", ".git/HEAD": "ref: refs/heads/main"})
    first = snap(top)
    write_tree(top, {"train.py": "edited", "new.py": ""})
    second = snap(top)
    assert (first.path / "train.py").read_text() == "old"
    assert (second.path / "train.py").read_text() == "edited"
    assert sorted(second.files) == ["new.py", "train.py"]


def test_source_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match=r"nowhere' is not a folder"):
        snap(tmp_path / "nowhere")


# --- Snapshots of an unchanged source


@pytest.mark.promise("submitting-unchanged-tree-copies-nothing")
def test_snapshot_of_an_unchanged_source_reuses_the_previous_copy(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "1", "d/b": "2"})
    first = snap(top)
    for _ in range(2):
        settle()
        again = snap(top)
        assert (again.id, again.path, again.is_new) == (first.id, first.path, False)
        assert again.files == first.files
    assert [path.name for path in (tmp_path / "workspace/snapshots").iterdir() if path.name != ".scans"] == [first.id]


def test_equal_content_in_another_folder_reuses_the_snapshot(tmp_path):
    for name in ("one", "two"):
        write_tree(tmp_path / name, {"a": "1", "d/b": "2"})
    first, second = snap(tmp_path / "one"), snap(tmp_path / "two")
    assert (second.id, second.is_new) == (first.id, False)


def test_snapshot_of_an_unchanged_source_reads_no_file_content(tmp_path, monkeypatch):
    top = write_tree(tmp_path / "code", {"a": "1", "d/b": "2"})
    settle()
    snap(top)

    def read(*arguments):
        raise AssertionError(f"read again: {arguments[1]}")

    monkeypatch.setattr(store, "_read", read)
    assert snap(top).is_new is False


def test_edit_with_equal_size_and_restored_times_is_detected(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "old"})
    settle()
    first, before = snap(top), (top / "a").stat()
    (top / "a").write_text("new")
    os.utime(top / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    second = snap(top)
    assert second.id != first.id
    assert (second.path / "a").read_text() == "new"


def coarse_clock(monkeypatch, tick_ns: int) -> None:
    """A file system whose times advance by ticks only."""

    def coarse(found):
        size, modified, changed, *others = stamp_of(found)
        return size, modified // tick_ns * tick_ns, changed // tick_ns * tick_ns, *others

    for module in (scan, store):
        monkeypatch.setattr(module, "stamp_of", coarse)


@pytest.mark.promise("edit-missed-even-one-within")
def test_edit_within_one_clock_tick_of_the_scan_is_detected(tmp_path, monkeypatch):
    coarse_clock(monkeypatch, 40_000_000)
    top = write_tree(tmp_path / "code", {"a": "000"})
    for number in range(1, 30):
        text = f"{number:03}"
        (top / "a").write_text(text)
        assert (snap(top).path / "a").read_text() == text


@pytest.mark.promise("submitting-unchanged-tree-copies-nothing")
def test_snapshot_after_a_small_edit_shares_unchanged_files_with_the_previous_snapshot(tmp_path):
    top = write_tree(tmp_path / "code", {"large": b"0" * 100_000, "a": "1"})
    first = snap(top)
    (top / "a").write_text("2")
    second = snap(top)
    assert (first.path / "large").stat().st_ino == (second.path / "large").stat().st_ino
    assert (first.path / "a").read_text() + (second.path / "a").read_text() == "12"


def test_damaged_file_of_the_previous_snapshot_is_copied_again_instead_of_shared(tmp_path):
    top = write_tree(tmp_path / "code", {"large": b"0" * 1000, "a": "1"})
    first = snap(top)
    (first.path / "large").write_bytes(b"1" * 1000)
    (top / "a").write_text("2")
    assert (snap(top).path / "large").read_bytes() == b"0" * 1000


def test_snapshot_deleted_from_the_store_is_created_again_with_the_same_id(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "1"})
    settle()
    first = snap(top)
    for path in (first.path / "a", first.path):
        path.unlink() if path.is_file() else path.rmdir()
    again = snap(top)
    assert (again.id, again.is_new) == (first.id, True)
    assert contents(again.path) == contents(top)


def test_damaged_scan_cache_is_ignored(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "1"})
    first = snap(top)
    (cache,) = (tmp_path / "workspace/snapshots/.scans").iterdir()
    for text in ("", "{", "null", '{"files": {}}'):
        cache.write_text(text)
        assert snap(top).id == first.id


def test_changed_file_mode_makes_a_new_snapshot(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "1"})
    settle()
    first = snap(top)
    (top / "a").chmod(0o755)
    assert snap(top).id != first.id


def test_changed_ignore_patterns_apply_to_the_next_snapshot(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "", "d/b": "", "d/c": ""})
    for patterns, expected in (("", "abc"), ("a\n", "bc"), ("/d/\n", "a"), ("", "abc"), ("*\n!a\n", "a")):
        (top / ".gitignore").write_text(patterns)
        settle()
        assert {Path(path).name for path in snap(top).files} - {".gitignore"} == set(expected)


def test_file_replaced_by_a_folder_or_link_is_detected(tmp_path):
    top = write_tree(tmp_path / "code", {"a": "1", ".gitignore": "x\n"})
    for make in (lambda p: p.mkdir(), lambda p: p.symlink_to(".gitignore"), lambda p: p.write_text("1")):
        settle()
        snap(top)
        (top / "a").rmdir() if (top / "a").is_dir() else (top / "a").unlink()
        make(top / "a")
        taken = snap(top)
        assert contents(taken.path) == contents(top)


# --- The id of a snapshot

small_files = st.dictionaries(
    st.sampled_from(["a", "b", "d/a", "d/e/a", "ü ö", "x.py"]), st.binary(max_size=3), min_size=1, max_size=4
)


def id_of(files: dict[str, bytes]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return snap(write_tree(Path(folder) / "code", files)).id


@given(small_files, small_files)
@settings(max_examples=60)
def test_snapshot_ids_are_equal_exactly_for_equal_content(one, other):
    assert (id_of(one) == id_of(other)) == (one == other)


@pytest.mark.promise("edit-missed-even-one-within")
@given(small_files, st.data())
@settings(max_examples=40)
def test_any_edit_changes_the_snapshot_id_and_undoing_the_edit_restores_the_id(files, data):
    with tempfile.TemporaryDirectory() as folder:
        top = write_tree(Path(folder) / "code", files)
        first = snap(top)
        name = data.draw(st.sampled_from(sorted(files)))
        new = data.draw(st.binary(max_size=3).filter(lambda content: content != files[name]))
        (top / name).write_bytes(new)
        assert snap(top).id != first.id
        (top / name).write_bytes(files[name])
        again = snap(top)
        assert (again.id, again.is_new) == (first.id, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda top: (top / "a").rename(top / "b"),
        lambda top: (top / "empty").mkdir(),
        lambda top: (top / "l").symlink_to("a"),
        lambda top: (top / "a").unlink(),
        lambda top: (top / "a").write_bytes(b"1\0"),
    ],
    ids=["renamed", "empty folder", "link", "removed", "longer"],
)
def test_every_kind_of_file_change_makes_a_new_snapshot(tmp_path, change):
    top = write_tree(tmp_path / "code", {"a": "1", "x": ""})
    first = snap(top)
    change(top)
    assert snap(top).id != first.id


# --- Files that change during the copy


@pytest.mark.promise("file-keeps-changing-while-read")
def test_a_file_that_keeps_changing_is_refused_by_name(tmp_path):
    top = write_tree(tmp_path / "code", {"train.py": "", "growing.log": b"0" * 30_000_000})
    stop = threading.Event()

    def write():
        with open(top / "growing.log", "ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b"0")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(SnapshotError, match=r"'growing\.log' in .* changed each of 3 times") as refused:
            snap(top)
    finally:
        stop.set()
        writer.join()
    assert ".amlignore" in str(refused.value)
    assert not list((tmp_path / "workspace/snapshots").glob("[!.]*"))


def test_file_changed_during_the_copy_is_read_again(tmp_path, monkeypatch):
    top = write_tree(tmp_path / "code", {"a": "old"})
    read, changed = store._read, []

    def changing(tree, path, target, meter):
        if not changed:
            changed.append(path)
            (top / "a").write_text("newer")
        return read(tree, path, target, meter)

    monkeypatch.setattr(store, "_read", changing)
    assert (snap(top).path / "a").read_text() == "newer"


def test_change_between_hash_and_copy_is_detected(tmp_path, monkeypatch):
    top = write_tree(tmp_path / "code", {"a": "old"})
    read, changed = store._read, []

    def changing(tree, path, target, meter):
        if target is not None and not changed:
            changed.append(path)
            (top / "a").write_text("new")
        return read(tree, path, target, meter)

    monkeypatch.setattr(store, "_read", changing)
    taken = snap(top)
    assert (taken.path / "a").read_text() == "new"
    monkeypatch.undo()
    assert snap(top, tmp_path / "elsewhere").id == taken.id


def test_change_between_hash_and_copy_within_one_clock_tick_is_detected(tmp_path, monkeypatch):
    coarse_clock(monkeypatch, 10**19)
    top = write_tree(tmp_path / "code", {"a": "old"})
    read, changed = store._read, []

    def changing(tree, path, target, meter):
        if target is not None and not changed:
            changed.append(path)
            (top / "a").write_text("new")
        return read(tree, path, target, meter)

    monkeypatch.setattr(store, "_read", changing)
    taken = snap(top)
    monkeypatch.undo()
    assert snap(taken.path, tmp_path / "elsewhere").id == taken.id


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text(""), lambda path: path.symlink_to("a")], ids=["file", "link"]
)
def test_file_removed_during_the_scan_is_skipped(tmp_path, monkeypatch, make):
    # Regression: an editor removed its swap file after the folder was listed and before the file was checked. So the
    # submission ended with a FileNotFoundError.
    top = write_tree(tmp_path / "code", {".gitignore": "nothing\n", "a": ""})
    make(top / "a.swp")
    ignores = Ignore.ignores

    def vanishing(self, path, *, is_directory):
        if path == "a.swp":
            (top / path).unlink(missing_ok=True)
        return ignores(self, path, is_directory=is_directory)

    monkeypatch.setattr(Ignore, "ignores", vanishing)
    assert snap(top).files == {".gitignore", "a"}


def test_file_removed_after_the_scan_is_skipped(tmp_path, monkeypatch):
    top = write_tree(tmp_path / "code", {"a": "", "b": ""})
    read = store._read

    def vanishing(tree, path, target, meter):
        (top / "b").unlink(missing_ok=True)
        return read(tree, path, target, meter)

    monkeypatch.setattr(store, "_read", vanishing)
    assert snap(top).files == {"a"}


def test_concurrent_snapshots_of_one_folder_have_one_id(tmp_path):
    top = write_tree(tmp_path / "code", {f"d{i}/{j}": f"{i} {j}" * 100 for i in range(10) for j in range(20)})
    code = """
import sys
from pathlib import Path
from paceline.snapshot.store import take
top, workspace = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(3): print(take(top, workspace / "snapshots", workspace).id)
"""
    started = [start_python(code, top, tmp_path / "workspace", stdin=-1) for _ in range(3)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    ids = {line for process in started for line in process.communicate("go\n")[0].split()}
    assert ids == {snap(top, tmp_path / "alone").id}
    assert contents(tmp_path / "workspace/snapshots" / ids.pop()) == contents(top)
    assert [path.name for path in (tmp_path / "workspace/snapshots").glob(".new-*")] == []


# --- Progress messages


def test_snapshot_progress_ends_at_the_total_size(tmp_path):
    top = write_tree(tmp_path / "code", {"a": b"0" * 2_500_000, "b": b"1" * 10})
    told: list[tuple[int, int]] = []
    take(top, tmp_path / "ws/snapshots", tmp_path / "ws", lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == 2 * 2_500_010  # each byte is hashed and then copied
    assert len(told) >= 4


def test_full_disk_during_the_copy_raises_snapshot_error(tmp_path, monkeypatch):
    top = write_tree(tmp_path / "code", {"a": "1"})

    def full(*arguments):
        raise OSError(28, "No space left on device", "a")

    monkeypatch.setattr(store, "_copy", full)
    with pytest.raises(SnapshotError, match=re.escape("No space left on device")):
        snap(top)
