from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from paceline.system.files import (
    PathAttribute,
    append_line,
    changed_at,
    copy_tree,
    gone_is_fine,
    is_at,
    json_lines,
    make_own,
    read_json,
    replacing,
    stamp_of,
    walk_files,
    write_json,
    write_whole,
)
from tests.helpers import run_python, start_python


def test_json_round_trips_through_a_file(tmp_path):
    path = tmp_path / "a.json"
    for value in ({"a": [1, None, "ü\n"]}, [], "text", float("inf")):
        write_json(path, value)
        assert read_json(path) == value


def test_reader_sees_the_whole_old_or_the_whole_new_file(tmp_path):
    path, texts = tmp_path / "a", {letter * 200_000 for letter in "ab"}
    write_whole(path, "a" * 200_000)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for text in texts:
                write_whole(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {path.read_text() for _ in range(300)} <= texts
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["a"]


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_whole(path, "old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_killed_writer_leaves_the_old_or_the_new_file_whole(tmp_path):
    path = tmp_path / "a"
    write_whole(path, "0" * 100_000)
    code = """
import sys
from pathlib import Path
from paceline.system.files import write_whole
print("go", flush=True)
number = 0
while True: number += 1; write_whole(Path(sys.argv[1]), str(number % 10) * 100_000)
"""
    for _ in range(3):
        with start_python(code, path) as process:
            process.stdout.readline()
            process.kill()
        assert path.read_text() in {digit * 100_000 for digit in "0123456789"}


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1', b"\xff"])
def test_invalid_json_reads_as_none(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert read_json(tmp_path / "a") is None


def test_missing_file_reads_as_none(tmp_path):
    assert read_json(tmp_path / "a") is None
    assert list(json_lines(tmp_path / "a")) == []


def test_appended_json_lines_are_read_in_order(tmp_path):
    path = tmp_path / "a.jsonl"
    values = [{"a": 1}, "new\nline", None, [1, 2]]
    for value in values:
        append_line(path, value)
    assert list(json_lines(path)) == values


def test_torn_json_line_is_skipped_and_lines_appended_later_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    append_line(path, 1)
    with open(path, "ab") as file:
        file.write(b'{"torn": "by a kil')
    append_line(path, 2)
    append_line(path, 3)
    assert list(json_lines(path)) == [1, 2, 3]


def test_lines_appended_by_several_processes_are_not_mixed(tmp_path):
    path = tmp_path / "a.jsonl"
    code = """
import sys
from pathlib import Path
from paceline.system.files import append_line
for number in range(200): append_line(Path(sys.argv[1]), [int(sys.argv[2]), number, "x" * 500])
"""
    started = [start_python(code, path, name) for name in range(4)]
    for process in started:
        process.communicate()
    found = list(json_lines(path))
    assert sorted((line[0], line[1]) for line in found) == [
        (name, number) for name in range(4) for number in range(200)
    ]
    for name in range(4):
        assert [line[1] for line in found if line[0] == name] == list(range(200))


def test_json_line_that_does_not_fit_on_the_disk_raises_an_error(tmp_path):
    # A limit on the file size cuts a write short, as a full disk does.
    path = tmp_path / "a.jsonl"
    code = """
import resource, sys
from pathlib import Path
from paceline.system.files import append_line, json_lines
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
written = []
try:
    for number in range(100):
        append_line(path, [number, "x" * 50])
        written.append(number)
except OSError: pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
append_line(path, ["after"])
print([line[0] for line in json_lines(path)] == [*written, "after"], len(written) < 100)
"""
    assert run_python(code, path) == "True True\n"


def test_file_name_that_is_not_utf8_round_trips_through_json(tmp_path):
    name = os.fsdecode(b"\xff.txt")
    write_json(tmp_path / "a", [name])
    assert read_json(tmp_path / "a") == [name]
    assert json.loads((tmp_path / "a").read_text()) == [name]


def test_private_folder_is_created_or_an_existing_one_made_private(tmp_path):
    path = tmp_path / "own"
    make_own(path)
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o775)
    make_own(path)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.promise("folder-somebody-else-may-write")
def test_folder_writable_by_others_is_refused(tmp_path):
    # Regression: another user who had created the folder in /tmp before could read and change its files.
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch(0o600)
    wrong = {"open": "can be written to by everybody", "link": "is a link", "file": "is not a folder"}
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 65534, 65534)
        wrong["theirs"] = r"belongs to another user \(number 65534\)"
    for name, what in wrong.items():
        with pytest.raises(PermissionError, match=f"{name}' {what}.*so nothing is put there. Remove it"):
            make_own(tmp_path / name)


def test_copied_tree_is_equal_and_shares_no_writable_file(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "model.pt").write_bytes(b"weights" * 1000)
    os.chmod(source / "deep" / "model.pt", 0o640)
    os.utime(source / "deep" / "model.pt", (1, 1_600_000_000))
    (source / "latest").symlink_to("deep")
    (source / "lost").symlink_to("nowhere")
    target.mkdir()
    copy_tree(source, target)
    copied = target / "deep" / "model.pt"
    assert copied.read_bytes() == b"weights" * 1000
    assert (copied.stat().st_mode & 0o777, copied.stat().st_mtime) == (0o640, 1_600_000_000)
    assert [os.readlink(target / name) for name in ("latest", "lost")] == ["deep", "nowhere"]
    # Writing into the copied checkpoint must not change the original.
    with copied.open("r+b") as file:
        file.write(b"other")
    assert (source / "deep" / "model.pt").read_bytes().startswith(b"weights")


def test_folder_walk_follows_links_but_visits_no_folder_twice(tmp_path):
    top = tmp_path / "top"
    (top / "own").mkdir(parents=True)
    (tmp_path / "else").mkdir()
    for path in (top / "a", top / "own" / "b", tmp_path / "else" / "c"):
        path.write_text("")
    (top / "linked").symlink_to(tmp_path / "else")
    # These links lead to the top folder, to a folder above it, and back through another link.
    (top / "own" / "up").symlink_to(top)
    (top / "above").symlink_to(tmp_path)
    (tmp_path / "else" / "again").symlink_to(top / "linked")
    (top / "nowhere").symlink_to(tmp_path / "no")
    # Regression: a link to itself ended the listing of a datastore, because the kernel reports such a link by another
    # error (ELOOP).
    (top / "itself").symlink_to("itself")
    os.mkfifo(top / "pipe")

    found = {name: is_file for name, _, is_file in walk_files(top)}

    assert sorted(name for name, is_file in found.items() if is_file) == ["a", "linked/c", "own/b"]
    assert sorted(name for name, is_file in found.items() if not is_file) == ["itself", "nowhere", "pipe"]


def test_failed_replacement_removes_the_temporary_file(tmp_path):
    path = tmp_path / "kept"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as beside:
            beside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ({one.name for one in tmp_path.iterdir()}, path.read_text()) == ({"kept"}, "old")

    with replacing(path) as beside:
        beside.write_text("new")
    assert ({one.name for one in tmp_path.iterdir()}, path.read_text()) == ({"kept"}, "new")


@dataclass(frozen=True)
class Folder:
    path: Path

    log = PathAttribute("logs/log.txt")


def test_path_attribute_of_a_folder_class_is_a_path_below_the_folder(tmp_path):
    assert Folder(tmp_path).log == tmp_path / "logs" / "log.txt"
    assert Folder(tmp_path / "other").log == tmp_path / "other" / "logs" / "log.txt"


def test_path_attribute_of_a_folder_class_is_not_a_dataclass_field(tmp_path):
    assert [field.name for field in fields(Folder)] == ["path"]
    assert Folder(tmp_path) == Folder(tmp_path)


def test_missing_file_is_no_error_in_a_with_block_of_gone_is_fine(tmp_path):
    seen = []
    with gone_is_fine():
        seen.append((tmp_path / "gone").stat())
    assert seen == []


def test_change_stamps_of_two_versions_of_a_file_with_equal_times_differ(tmp_path):
    path, stamps = tmp_path / "a", []
    for text in "ab":
        write_whole(path, text)
        os.utime(path, ns=(1, 1))
        stamps.append(stamp_of(path))
    assert stamps[0] != stamps[1]
    assert (stamp_of(tmp_path / "gone"), changed_at(tmp_path / "gone")) == (None, 0.0)


def test_is_at_returns_false_after_the_path_of_an_open_file_was_replaced_or_removed(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with open(path) as file:
        assert is_at(path, file.fileno())
        write_whole(path, "new")
        assert not is_at(path, file.fileno())
        path.unlink()
        assert not is_at(path, file.fileno())
