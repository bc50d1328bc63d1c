from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.remote.link.mirror_receiver import Inbox
from paceline.system.files import json_lines


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


@pytest.fixture
def of_run(tmp_path):
    (tmp_path / "run").mkdir()
    return Inbox(tmp_path / "run", of_run=True)


def left_out(inbox):
    return [line["name"] for line in json_lines(inbox.top / "left_out.jsonl")]


@pytest.mark.parametrize(
    ("target", "made"),
    [
        ("b", "b"),
        ("../checkpoints/9.pt", "../checkpoints/9.pt"),
        ("./x/../b", "b"),
        ("/etc/passwd", None),
        ("../../x", None),
        ("../run.json", None),
    ],
)
def test_a_link_from_a_node_leads_to_the_runs_own_files_or_is_left_out_by_name(of_run, target, made):
    of_run.take({"file": "outputs/a", "how": "link", "target": target, "mtime": 1}, b"")
    path = of_run.top / "outputs/a"
    assert (os.readlink(path) if path.is_symlink() else None) == made
    assert left_out(of_run) == ([] if made else ["outputs/a"])


def test_behind_a_link_a_link_is_made_for_where_it_will_lie(of_run):
    of_run.take({"file": "outputs/d", "how": "link", "target": "deep/er", "mtime": 1}, b"")
    (of_run.top / "outputs/deep/er").mkdir(parents=True)
    # By its name it would stay in the run's folder; from where it lies it leads out of the run's files.
    of_run.take({"file": "outputs/d/l", "how": "link", "target": "../../../../x", "mtime": 1}, b"")
    of_run.take({"file": "outputs/d/m", "how": "link", "target": "../../x", "mtime": 1}, b"")
    assert os.readlink(of_run.top / "outputs/deep/er/m") == "../../x"
    assert left_out(of_run) == ["outputs/d/l"]


@pytest.mark.parametrize(
    "name",
    ["run.json", "target.json", "engine.json", "lock", "cancel.json", "snapshot", "left_out.jsonl", "logs/rank_0.log"],
)
def test_what_nodes_do_not_write_is_not_taken_from_them(of_run, name):
    for header, data in (part(name, b"x"), (grow(name, 0, "new"), b"x"), part(f"{name}/x", b"x")):
        with pytest.raises(PermissionError):
            of_run.take(header, data)
    with pytest.raises(PermissionError):
        of_run.take({"file": name, "how": "link", "target": "outputs", "mtime": 1}, b"")
    assert os.listdir(of_run.top) == []


def test_nothing_is_added_to_what_a_link_leads_to(of_run, tmp_path):
    (of_run.top / "metrics").mkdir()
    (tmp_path / "mine").write_text("")
    for name, how in (("metrics/rank_0.jsonl", "grow"), ("notes.jsonl", "append")):
        (of_run.top / name).symlink_to(tmp_path / "mine")
        with pytest.raises(OSError, match="symbolic links"):
            of_run.take(grow(name, 0, how=how), b"x")
    assert (tmp_path / "mine").read_text() == ""


def test_a_folder_takes_the_place_of_a_link_and_a_link_that_is_gone_goes(of_run):
    for name in ("a", "b"):
        of_run.take({"file": f"outputs/{name}", "how": "link", "target": "../checkpoints", "mtime": 1}, b"")
    of_run.take({"file": "outputs/a", "how": "dir", "mode": 0o755}, b"")
    of_run.take(*part("outputs/a/x", b"x"))
    of_run.take({"file": "outputs/b", "how": "gone", "stamp": [7, 7]}, b"")
    of_run.close()
    assert sorted(path.name for path in of_run.top.rglob("*")) == ["a", "outputs", "x"]


def test_what_a_node_leaves_out_is_noted_once(of_run):
    for _ in range(2):
        of_run.take({"file": "outputs/pipe", "how": "left", "why": "a pipe"}, b"")
    of_run.take({"file": "../../x", "how": "left", "why": "a pipe"}, b"")
    assert list(json_lines(of_run.top / "left_out.jsonl")) == [{"name": "outputs/pipe", "why": "a pipe"}]
    assert os.listdir(of_run.top) == ["left_out.jsonl"], "no folder is made for it: the output may be stored and gone"
