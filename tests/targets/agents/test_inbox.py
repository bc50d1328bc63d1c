from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.targets.agents.inbox import Inbox


def part(name: str, data: bytes, *, key: int = 1, mtime: int = 1, **values):
    header = {"file": name, "how": "part", "key": key, "end": True, "size": len(data), "mode": 0o640, "mtime": mtime}
    return header | values, data


def grow(name: str, at: int, cut: str = "", ino: int = 7, how: str = "grow"):
    return {"file": name, "how": how, "at": at, "cut": cut, "ino": ino}


@pytest.fixture
def inbox(tmp_path):
    return Inbox(tmp_path)


def test_a_file_has_its_name_once_it_is_whole(inbox, tmp_path):
    inbox.take(*part("outputs/a", b"one ", end=False))
    assert not (tmp_path / "outputs/a").exists()
    header, data = part("outputs/a", b"two", size=7)
    inbox.take(header, data)
    found = os.stat(tmp_path / "outputs/a")
    assert ((tmp_path / "outputs/a").read_bytes(), found.st_mode & 0o777, found.st_mtime_ns) == (b"one two", 0o640, 1)
    inbox.close()
    assert os.listdir(tmp_path) == ["outputs"]


def test_what_came_in_part_goes_with_its_node(inbox, tmp_path):
    inbox.take(*part("a", b"one", end=False), rank=0)
    inbox.take(*part("b", b"one", end=False), rank=1)
    inbox.close(0)
    assert os.listdir(tmp_path / ".incoming") == ["1-1"]
    inbox.take(*part("b", b"two", size=6), rank=1)
    inbox.close(1)
    assert os.listdir(tmp_path) == ["b"]


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ((0, 5), (1, 6), b"1"),
        ((0, 6), (1, 5), b"0"),
        ((0, 5), (1, 5), b"0"),
        ((1, 5), (0, 5), b"0"),
        ((0, 6), (0, 5), b"0!"),
    ],
)
def test_of_two_files_of_one_name_the_later_stays_or_that_of_the_lower_rank(inbox, tmp_path, first, second, left):
    for count, (rank, mtime) in enumerate((first, second)):
        text = str(rank) + "!" * (count and first[0] == second[0])
        inbox.take(*part("outputs/o", text.encode(), mtime=mtime), rank=rank)
    assert (tmp_path / "outputs/o").read_bytes() == left


def test_what_grows_is_written_where_it_belongs(inbox, tmp_path):
    inbox.take(grow("log", 0, "new"), b"one\n")
    inbox.take(grow("log", 4), b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    inbox.take(grow("log", 0, "shrunk"), b"x")
    assert (tmp_path / "log").read_bytes() == b"x"


def test_two_nodes_that_see_one_file_bring_it_once(inbox, tmp_path):
    for how, name in (("grow", "log"), ("append", "notes.jsonl")):
        inbox.take(grow(name, 0, "new", how=how), b"one\ntwo\n", rank=0)
        inbox.take(grow(name, 0, "new", how=how), b"one\n", rank=1)
        inbox.take(grow(name, 4, how=how), b"two\nthree\n", rank=1)
        assert (tmp_path / name).read_bytes() == b"one\ntwo\nthree\n"


def test_two_nodes_that_do_not_both_add_to_the_notes_of_here(inbox, tmp_path):
    (tmp_path / "notes.jsonl").write_bytes(b"mine\n")
    inbox.take(grow("notes.jsonl", 5, how="append"), b"a\n", rank=0, group=0)
    inbox.take(grow("notes.jsonl", 5, how="append"), b"b\n", rank=1, group=1)
    assert (tmp_path / "notes.jsonl").read_bytes() == b"mine\na\nb\n"


def test_what_a_node_has_removed_is_removed_unless_it_is_anothers(inbox, tmp_path):
    inbox.take(*part("checkpoints/a", b"1"), rank=0)
    inbox.take({"file": "checkpoints/a", "how": "gone", "stamp": [1, 1]}, b"", rank=1)
    assert (tmp_path / "checkpoints/a").exists()
    inbox.take({"file": "checkpoints/a", "how": "gone", "stamp": [1, 2]}, b"", rank=0)
    assert (tmp_path / "checkpoints/a").exists()
    inbox.take({"file": "checkpoints/a", "how": "gone", "stamp": [1, 1]}, b"", rank=0)
    inbox.take({"file": "checkpoints", "how": "gone", "stamp": [0, 0]}, b"", rank=0)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "outputs/../../x", ".", "out/x"])
def test_no_name_leaves_the_folder(tmp_path, name):
    top: Path = tmp_path / "run"
    top.mkdir()
    (top / "out").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        Inbox(top).take(*part(name, b"x"))
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_file_for_which_there_is_no_room_is_an_error_once_it_is_to_have_its_name(tmp_path, small_disk):
    inbox = Inbox(small_disk)
    piece = b"x" * 700_000
    inbox.take(*part("a", piece, end=False))
    with pytest.raises(OSError, match="No space"):
        inbox.take(*part("a", piece, end=False))
    inbox.take(*part("a", b"", end=False))
    with pytest.raises(OSError, match="No space"):
        inbox.take(*part("a", b"x", size=1_400_001))
    inbox.take(*part("b", piece, key=2))
    assert sorted(os.listdir(small_disk)) == [".incoming", "b"]
    assert os.listdir(small_disk / ".incoming") == []
