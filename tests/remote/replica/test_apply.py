from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.remote.replica import apply
from paceline.remote.replica.apply import Replica, ReplicaError
from paceline.system.files import json_lines

#: Files in a run folder that only the submitting machine writes.
OWN = (
    "target.json",
    "engine.json",
    "home.json",
    "secrets.json",
    "lock",
    "cancel.json",
    "snapshot",
    ".travel.json",
    "exec/x",
)


def part(name: str, data: bytes, *, key: int = 1, mtime: int = 1, at: int = 0, end: bool = True, **values: Any) -> Any:
    stamp = [at + len(data), mtime, 9]
    header = {"file": name, "how": "part", "key": key, "at": at, "mode": 0o640, "stamp": stamp}
    return header | ({"end": True} if end else {}) | values, data


def grow(name: str, at: int, cut: str = "", ino: int = 7, how: str = "grow") -> dict[str, Any]:
    return {"file": name, "how": how, "at": at, "cut": cut, "ino": ino}


def link(name: str, target: str) -> dict[str, Any]:
    return {"file": name, "how": "link", "target": target, "stamp": [1, 1, 9]}


@pytest.fixture
def here(tmp_path: Path) -> Replica:
    """Of a run whose supervisor is here."""
    (tmp_path / "run").mkdir()
    return Replica(tmp_path / "run")


@pytest.fixture
def copy(tmp_path: Path) -> Replica:
    """Of a run whose supervisor is there; each record that has come is in `state.json.came`."""
    (tmp_path / "copy").mkdir()
    return Replica(tmp_path / "copy", take_record=(tmp_path / "record").write_bytes)


def test_received_file_appears_only_when_complete(here):
    here.apply(*part("outputs/a", b"one ", end=False))
    assert not (here.top / "outputs").exists()
    here.apply(*part("outputs/a", b"two", at=4))
    found = os.stat(here.top / "outputs/a")
    assert ((here.top / "outputs/a").read_bytes(), found.st_mode & 0o777, found.st_mtime_ns) == (b"one two", 0o640, 1)
    here.close()
    assert os.listdir(here.top) == ["outputs"]


def test_partial_files_are_removed_when_the_link_of_their_node_closes(here):
    here.apply(*part("outputs/a", b"one", end=False), rank=0)
    here.apply(*part("outputs/b", b"one", end=False), rank=1)
    here.close(0)
    assert os.listdir(here.top / ".incoming") == ["1-1"]
    here.apply(*part("outputs/b", b"two", at=3), rank=1)
    here.close(1)
    assert os.listdir(here.top) == ["outputs"]
    here.apply(*part("outputs/c", b"one", key=2, end=False))
    here.apply({"file": "outputs/c", "how": "part", "key": 2, "drop": True})
    assert os.listdir(here.top / ".incoming") == []


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
def test_file_sent_by_two_nodes_keeps_the_newer_version_and_at_equal_times_the_lower_rank(here, first, second, left):
    for count, (rank, mtime) in enumerate((first, second)):
        text = str(rank) + "!" * (count and first[0] == second[0])
        here.apply(*part("outputs/o", text.encode(), mtime=mtime), rank=rank)
    assert (here.top / "outputs/o").read_bytes() == left


def test_appended_bytes_of_a_growing_file_are_written_at_their_offset(here):
    log = here.top / "attempts/1/rank_0.log"
    here.apply(grow("attempts/1/rank_0.log", 0, "new"), b"one\n")
    here.apply(grow("attempts/1/rank_0.log", 4), b"two\n")
    assert log.read_bytes() == b"one\ntwo\n"
    here.apply(grow("attempts/1/rank_0.log", 0, "shrunk"), b"x")
    assert log.read_bytes() == b"x"
    here.apply(grow("attempts/1/rank_0.log", 0, "new", ino=8), b"")
    assert log.read_bytes() == b""


def test_growing_file_gets_no_hole_where_the_disk_has_refused_its_lines(here, monkeypatch):
    name = "attempts/1/rank_0.log"
    here.apply(grow(name, 0, "new"), b"one\n")
    with monkeypatch.context() as patched:
        patched.setattr(apply, "_write", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            here.apply(grow(name, 4), b"two\n")
    for at in (8, 14):
        with pytest.raises(OSError, match="Input/output error"):
            here.apply(grow(name, at), b"three\n")
    assert (here.top / name).read_bytes() == b"one\n"
    assert here.known[name][0] == 4
    here.apply(grow(name, 0, "new"), b"one\ntwo\n")
    here.apply(grow(name, 8), b"three\n")
    assert (here.top / name).read_bytes() == b"one\ntwo\nthree\n"


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_lines_of_a_file_reported_by_two_nodes_are_written_to_the_copy_only_once(here):
    for how, name in (("grow", "metrics/rank_0.jsonl"), ("append", "notes.jsonl")):
        here.apply(grow(name, 0, "new", how=how), b"one\ntwo\n", rank=0)
        here.apply(grow(name, 0, "new", how=how), b"one\n", rank=1)
        here.apply(grow(name, 4, how=how), b"two\nthree\n", rank=1)
        assert (here.top / name).read_bytes() == b"one\ntwo\nthree\n"


def test_tags_written_on_two_nodes_are_appended_to_the_local_notes_file(here):
    (here.top / "notes.jsonl").write_bytes(b"mine\n")
    here.apply(grow("notes.jsonl", 5, how="append"), b"a\n", rank=0, group=0)
    here.apply(grow("notes.jsonl", 5, how="append"), b"b\n", rank=1, group=1)
    assert (here.top / "notes.jsonl").read_bytes() == b"mine\na\nb\n"


def test_removal_reported_by_a_node_deletes_only_the_version_that_the_node_sent(here):
    def gone(name: str, *stamp: int) -> dict[str, Any]:
        return {"file": name, "how": "gone", "stamp": [*stamp, 9]}

    here.apply(*part("checkpoints/d/a", b"1"), rank=0)
    here.apply(gone("checkpoints/d/a", 1, 1), rank=1)
    assert (here.top / "checkpoints/d/a").exists()
    here.apply(gone("checkpoints/d/a", 1, 2), rank=0)
    assert (here.top / "checkpoints/d/a").exists()
    here.apply(gone("checkpoints/d", 0, 0), rank=0)
    here.apply(gone("checkpoints/d/a", 1, 1), rank=0)
    here.apply(gone("checkpoints/d", 0, 0), rank=0)
    assert not (here.top / "checkpoints/d").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "outputs/../../x", ".", "", "a//b", "outputs/\0", "out/x"])
def test_received_name_outside_the_folder_is_refused(here, copy, tmp_path, name):
    for replica in (here, copy):
        (replica.top / "out").symlink_to(tmp_path)
        with pytest.raises(ReplicaError, match=r"name .* is not"):
            replica.apply(*part(name, b"x"))
        assert os.listdir(replica.top) == ["out"]


def test_file_without_disk_space_raises_when_completed(small_disk):
    replica = Replica(small_disk)
    piece = b"x" * 700_000
    replica.apply(*part("outputs/a", piece, end=False))
    with pytest.raises(OSError, match="No space"):
        replica.apply(*part("outputs/a", piece, at=700_000, end=False))
    replica.apply(*part("outputs/a", b"", at=1_400_000, end=False))
    with pytest.raises(OSError, match="No space"):
        replica.apply(*part("outputs/a", b"x", at=1_400_000))
    replica.apply(*part("outputs/b", piece, key=2))
    assert sorted(os.listdir(small_disk / "outputs")) == ["b"]
    assert os.listdir(small_disk / ".incoming") == []


def left_out(replica):
    return [line["name"] for line in json_lines(replica.top / "left_out.jsonl")]


@pytest.mark.parametrize(
    ("target", "made"),
    [
        ("b", "b"),
        ("../checkpoints/9.pt", "../checkpoints/9.pt"),
        ("./x/../b", "b"),
        ("/etc/passwd", None),
        ("../../x", None),
        ("../state.json", None),
        ("d/../../../../x", None),
    ],
)
def test_received_symlink_that_leads_out_of_the_run_is_not_created(here, copy, target, made):
    here.apply(link("outputs/a", target))
    path = here.top / "outputs/a"
    assert (os.readlink(path) if path.is_symlink() else None) == made
    assert left_out(here) == ([] if made else ["outputs/a"])
    if made:
        copy.apply(link("outputs/a", target))
    else:
        with pytest.raises(ReplicaError, match="leads out of the run's folder"):
            copy.apply(link("outputs/a", target))
    assert (copy.top / "outputs/a").is_symlink() == bool(made)


def test_file_that_replaces_a_symlink_does_not_follow_it(here, copy):
    for replica in (here, copy):
        replica.apply(*part("checkpoints/9.pt", b"nine"))
        replica.apply(link("outputs/latest", "../checkpoints"))
        replica.apply({"file": "outputs/latest/9.pt", "how": "gone", "stamp": [4, 1, 9]})
        assert (replica.top / "checkpoints/9.pt").read_text() == "nine"
        replica.apply(*part("outputs/latest/9.pt", b"other", key=2))
        assert (replica.top / "checkpoints/9.pt").read_text() == "nine"
        assert (replica.top / "outputs/latest/9.pt").read_text() == "other"


def test_received_file_is_not_written_through_a_symlink_out_of_the_run_folder(copy, tmp_path):
    (tmp_path / "outside").mkdir()
    (copy.top / "logs").symlink_to(tmp_path / "outside")
    with pytest.raises(ReplicaError, match="has a link in it"):
        copy.apply(grow("logs/driver.log", 0, "new"), b"x")
    assert os.listdir(tmp_path / "outside") == []


@pytest.mark.parametrize(
    "name",
    [*OWN, "job.json", "state.json", "left_out.jsonl", "data.json", "events.jsonl", "logs/rank_0.log"],
)
def test_received_files_that_nodes_may_not_write_are_refused(here, name):
    for header, data in (part(name, b"x"), (grow(name, 0, "new"), b"x"), (link(name, "outputs"), b"")):
        with pytest.raises(ReplicaError, match="not one that the other side may send"):
            here.apply(header, data)
    assert os.listdir(here.top) == []


@pytest.mark.parametrize("name", [*OWN, "job.json", "outputs"])
def test_received_files_that_only_the_local_machine_may_write_are_refused(copy, name):
    for header, data in (part(name, b"x"), (grow(name, 0, "new"), b"x"), (link(name, "checkpoints"), b"")):
        with pytest.raises(ReplicaError, match="not one that the other side may send"):
            copy.apply(header, data)
    assert os.listdir(copy.top) == []


def test_append_does_not_follow_symlinks(here, tmp_path):
    (here.top / "metrics").mkdir()
    (tmp_path / "mine").write_text("")
    for name, how in (("metrics/rank_0.jsonl", "grow"), ("notes.jsonl", "append")):
        (here.top / name).symlink_to(tmp_path / "mine")
        with pytest.raises(OSError, match="symbolic links"):
            here.apply(grow(name, 0, how=how), b"x")
    assert (tmp_path / "mine").read_text() == ""


def test_received_folder_replaces_a_link_and_removed_links_are_removed(here):
    for name in ("a", "b"):
        here.apply(link(f"outputs/{name}", "../checkpoints"))
    here.apply({"file": "outputs/a", "how": "dir", "stamp": [0, 0, 0]})
    here.apply(*part("outputs/a/x", b"x"))
    here.apply({"file": "outputs/b", "how": "gone", "stamp": [7, 7, 7]})
    here.close()
    assert sorted(path.name for path in here.top.rglob("*")) == ["a", "outputs", "x"]


def test_received_folder_replaces_a_file_and_a_file_replaces_a_folder(here, copy):
    for replica in (here, copy):
        replica.apply(*part("outputs/a", b"x"))
        replica.apply({"file": "outputs/a", "how": "dir", "stamp": [0, 0, 0]})
        replica.apply(*part("outputs/a/x", b"x"))
    copy.apply(*part("outputs/a", b"y", key=3))
    assert (copy.top / "outputs/a").read_text() == "y"
    # A file does not replace a folder with files, because they may belong to another node.
    with pytest.raises(OSError, match="not empty"):
        here.apply(*part("outputs/a", b"y", key=3))
    assert (here.top / "outputs/a/x").read_text() == "x"


def test_excluded_file_that_a_node_reports_twice_is_recorded_once(here):
    for _ in range(2):
        here.apply({"file": "outputs/pipe", "how": "left", "why": "a pipe"})
    here.apply({"file": "uploads", "how": "left", "why": "a link"})
    with pytest.raises(ReplicaError):
        here.apply({"file": "../../x", "how": "left", "why": "a pipe"})
    assert left_out(here) == ["outputs/pipe", "uploads"]
    assert os.listdir(here.top) == ["left_out.jsonl"], "no folder is made for it: the output may be stored and gone"


def test_replica_writes_no_file_for_a_reported_pipe(copy):
    copy.apply({"file": "outputs/pipe", "how": "left", "why": "a pipe"})
    assert os.listdir(copy.top) == []


def test_received_state_json_of_a_run_is_passed_to_a_callback_instead_of_written_to_the_copy(copy, tmp_path):
    copy.apply(*part("state.json", b"{}"))
    copy.apply(*part("outputs/state.json", b"mine", key=2))
    copy.close()
    assert (tmp_path / "record").read_bytes() == b"{}"
    assert sorted(os.listdir(copy.top)) == ["outputs"]


def test_replaying_received_changes_twice_leaves_the_folder_unchanged(copy):
    """Their reader was killed before it had noted them: another process begins in the middle of a file that is whole."""
    frames = [part("outputs/a", b"one ", end=False), part("outputs/a", b"two", at=4)]
    for header, _ in frames:
        header["stamp"] = [7, 1, 9]
    frames += [(grow("logs/driver.log", 0, "new"), b"one\n"), (grow("logs/driver.log", 4), b"two\n")]
    for begin in (0, 0, 1, 3):
        again = Replica(copy.top, take_record=copy._take_record)
        for header, data in frames[begin:]:
            again.apply(header, data)
        again.close()
        assert (copy.top / "outputs/a").read_bytes() == b"one two"
        assert (copy.top / "logs/driver.log").read_bytes() == b"one\ntwo\n"


def test_second_chunk_of_a_file_without_its_first_chunk_is_refused(copy):
    with pytest.raises(ReplicaError, match="the beginning has not come"):
        copy.apply(*part("outputs/a", b"two", at=4))
    assert not (copy.top / "outputs/a").exists()


@pytest.mark.parametrize(
    "header", [{}, {"file": "outputs/a"}, {"file": "outputs/a", "how": "x"}, {"file": 3, "how": "dir"}]
)
def test_received_file_change_with_missing_or_wrong_fields_is_refused(copy, header):
    with pytest.raises(ReplicaError, match="not a change of a file"):
        copy.apply(header)


def test_replica_lists_exactly_the_received_files_that_were_not_removed_since(copy):
    copy.apply(grow("metrics/rank_0.jsonl", 0, "new"), b"one\n")
    copy.apply(*part("outputs/a", b"x"))
    copy.apply(*part("outputs/b", b"x", key=2))
    copy.apply({"file": "outputs/b", "how": "gone", "stamp": [1, 1, 9]})
    assert copy.known == {"metrics/rank_0.jsonl": [4, 0, 7], "outputs/a": [1, 1, 9]}
    assert copy.have() == {
        "metrics/rank_0.jsonl": [4, *copy.have()["metrics/rank_0.jsonl"][1:]],
        "outputs/a": [1, 1, 0],
    }
