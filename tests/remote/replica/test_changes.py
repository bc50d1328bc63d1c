"""Changes in one folder, applied to another: after each look both are equal."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.remote import wire
from paceline.remote.replica import changes as changes_module
from paceline.remote.replica.apply import Replica
from paceline.remote.replica.changes import LARGE, Changes, small_names
from paceline.system.links import entries
from tests.helpers import write_tree

NASTY = "a b;$(touch x) 'q' \"d\" \udcff"


class Two:
    """A folder there, and the copy of it here. frames: all that were sent."""

    def __init__(self, top: Path) -> None:
        self.there, self.here = top / "there", top / "here"
        top.mkdir(exist_ok=True)
        write_tree(self.there, {"checkpoints/.k": ""})
        self.here.mkdir()
        self.changes = Changes(str(self.there), {})
        self.replica = Replica(self.here, take_record=lambda data: None)
        self.frames: list[dict[str, Any]] = []

    def write(self, files: dict[str, str]) -> None:
        write_tree(self.there, files)

    def sync(self, *, final: bool = False) -> list[str]:
        """The names in the frames that this took."""
        found = [*self.changes.small(small_names(str(self.there))), *self.changes.large(final)]
        for one in found:
            if one is not None:
                self.replica.apply(*one)
                self.frames.append({**one[0], "data": one[1]})
        return [one[0]["file"] for one in found if one is not None]

    def text(self, name: str) -> str:
        return (self.here / name).read_text()

    def of(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.frames if one["file"] == name]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    """Files of the user's rest at once."""
    monkeypatch.setattr(changes_module, "QUIET_S", 0.0)
    return Two(tmp_path)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "CHUNK_BYTES", 1000)


def test_growing_file_is_sent_from_its_last_offset(two: Two) -> None:
    two.write({"logs/driver.log": "x" * 10_000, "attempts/1/rank_0.log": ""})
    two.sync()
    with open(two.there / "logs/driver.log", "a") as log:
        log.write("one more line\n")
    assert two.sync() == ["logs/driver.log"]
    assert two.frames[-1]["data"] == b"one more line\n"
    assert two.text("logs/driver.log") == "x" * 10_000 + "one more line\n"
    assert two.text("attempts/1/rank_0.log") == "", "an empty log is a log"
    assert two.sync() == []


@pytest.mark.parametrize("size", [2, 50, 80])
def test_replaced_file_is_sent_whole(two: Two, size: int) -> None:
    two.write({"attempts/1/rank_0.log": "o" * 50})
    two.sync()
    write_tree(two.there, {"attempts/1/.new": "n" * size})
    os.replace(two.there / "attempts/1/.new", two.there / "attempts/1/rank_0.log")
    two.sync()
    assert two.text("attempts/1/rank_0.log") == "n" * size


def test_truncated_file_is_sent_whole(two: Two) -> None:
    two.write({"attempts/1/rank_0.log": "one\ntwo\n"})
    two.sync()
    os.truncate(two.there / "attempts/1/rank_0.log", 2)
    two.sync()
    assert two.text("attempts/1/rank_0.log") == "on"


def test_file_sync_restarted_with_the_contents_of_the_replica_sends_only_changed_files(two: Two) -> None:
    two.write({"metrics/rank_0.jsonl": "1\n2\n", "outputs/o": "o", "attempts/1/rank_0.log": "new run\n"})
    two.sync(final=True)
    two.frames.clear()
    known = Replica(two.here).have()
    (two.there / "attempts/1/rank_0.log").unlink()
    two.changes = Changes(str(two.there), known)
    assert two.sync(final=True) == []
    two.write({"attempts/1/rank_0.log": "quite another\n"})
    two.sync()
    assert two.text("attempts/1/rank_0.log") == "quite another\n"


def test_lines_added_to_the_notes_files_of_both_machines_are_merged_without_duplicates(two: Two) -> None:
    for top in (two.there, two.here):
        write_tree(top, {"notes.jsonl": "both\n", "events.jsonl": "first\n"})
    two.changes.skip(["notes.jsonl", "events.jsonl", "data.json"])
    assert two.sync() == ["checkpoints/.k"]
    for top, text in ((two.there, "there\n"), (two.here, "here\n")):
        with open(top / "notes.jsonl", "a") as notes:
            notes.write(text)
    two.write({"data.json": "{}"})
    two.sync()
    assert two.text("notes.jsonl") == "both\nhere\nthere\n"
    assert (two.text("events.jsonl"), two.text("data.json")) == ("first\n", "{}")


def test_files_links_and_folders_are_copied_completely(two: Two) -> None:
    two.write({f"outputs/{NASTY}/model": "weights", "outputs/step/a": "1", "checkpoints/9.pt": "nine", "work/w": "w"})
    (two.there / "uploads/empty").mkdir(parents=True)
    (two.there / "logs").mkdir()
    (two.there / "logs/rank_0.log").symlink_to("../attempts/1/rank_0.log")
    (two.there / "logs/passwd").symlink_to("/etc/passwd")
    (two.there / "logs/outputs").symlink_to("../outputs")
    os.chmod(two.there / f"outputs/{NASTY}/model", 0o4750)
    for name, target in {
        "latest": two.there / "outputs/step",
        "best": "../checkpoints/9.pt",
        "w": "../work/w",
        "abs": "/etc",
        "out": "../../../etc",
    }.items():
        (two.there / "outputs" / name).symlink_to(target)
    os.mkfifo(two.there / "outputs/pipe")
    two.sync()
    assert not [one for one in two.frames if one["how"] == "left"], "it may be on its way"
    two.sync(final=True)
    model = two.here / f"outputs/{NASTY}/model"
    assert model.read_text() == "weights"
    assert model.stat().st_mode & 0o7777 == 0o750
    assert model.stat().st_mtime_ns == (two.there / f"outputs/{NASTY}/model").stat().st_mtime_ns
    assert (two.here / "uploads/empty").is_dir()
    assert {path.name: os.readlink(path) for path in (two.here / "logs").iterdir()} == {
        "rank_0.log": "../attempts/1/rank_0.log"
    }
    found = {path.name: os.readlink(path) if path.is_symlink() else "" for path in (two.here / "outputs").iterdir()}
    assert found == {NASTY: "", "step": "", "latest": "step", "best": "../checkpoints/9.pt", "w": ""}
    assert two.text("outputs/w") == "w"
    assert not (two.here / "work").exists()
    left = {one["file"]: one["why"] for one in two.frames if one["how"] == "left"}
    assert left["outputs/pipe"] == "a pipe"
    assert set(left) == {"outputs/pipe", "outputs/abs", "outputs/out"}
    assert two.sync(final=True) == [], "it is told once"


def test_lock_secrets_records_and_hidden_files_of_a_run_are_not_sent(two: Two) -> None:
    names = (
        "lock",
        "ballast",
        "target.json",
        "cancel.json",
        "exec/0a/in_0.json",
        "secrets.json",
        ".hidden",
        "job.json",
        "state.json",
    )
    passing = ("attempts/1/rank_0.held", "attempts/1/.start_0.json.1", "attempts/1/exec_0a.jsonl")
    two.write(dict.fromkeys((*names, *passing), "x"))
    (two.there / "snapshot").symlink_to("elsewhere")
    two.sync(final=True)
    assert [str(path.relative_to(two.here)) for path in two.here.rglob("*") if not path.is_dir()] == ["checkpoints/.k"]
    assert "attempts/1/exec_0a.jsonl" in small_names(str(two.there), hidden=())


def test_recently_changed_file_is_sent_only_after_a_pause_or_at_the_end(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "QUIET_S", 600.0)
    two.write({"checkpoints/1.pt": "half"})
    os.utime(two.there / "checkpoints/1.pt", (1, 1))
    two.sync()
    assert not (two.here / "checkpoints").exists()
    two.sync(final=True)
    assert two.text("checkpoints/1.pt") == "half"


def test_file_replaced_with_equal_size_and_time_is_sent_again(two: Two) -> None:
    for text in ("old", "new"):
        two.write({"outputs/.beside": text})
        os.utime(two.there / "outputs/.beside", (1, 1))
        os.replace(two.there / "outputs/.beside", two.there / "outputs/latest.pt")
        two.sync()
        assert two.text("outputs/latest.pt") == text


def test_removed_file_and_empty_folder_are_removed_in_the_copy(two: Two) -> None:
    two.write({"checkpoints/step/1.pt": "a", "checkpoints/other/1.pt": "a", "outputs/latest/x": "x"})
    two.sync()
    (two.there / "checkpoints/step/1.pt").unlink()
    (two.there / "checkpoints/step").rmdir()
    two.sync()
    assert sorted(os.listdir(two.here / "checkpoints")) == [".k", "other"]
    (two.there / "checkpoints").rename(two.there / "going")
    two.sync()
    assert two.text("checkpoints/other/1.pt") == "a", "where the run's folder itself goes, its copy stays"


def test_folder_that_replaces_a_users_link_is_sent(two: Two) -> None:
    two.write({"uploads/model/real/a": "a"})
    (two.there / "uploads/model/link").symlink_to("real")
    two.sync()
    assert (two.here / "uploads/model/link").is_symlink()
    (two.there / "uploads/model/link").unlink()
    two.write({"uploads/model/link/a": "b"})
    two.sync()
    assert not (two.here / "uploads/model/link").is_symlink()
    assert (two.text("uploads/model/link/a"), two.text("uploads/model/real/a")) == ("b", "a")


def whole(two: Two, name: str, meanwhile: str) -> list[dict[str, Any]]:
    """Return the frames of a file that is rewritten after its first piece was read."""
    path, found = two.there / name, []
    for one in two.changes.large():
        assert one is not None
        if not found:
            path.write_text(meanwhile)
            os.utime(path, (1, 1))
        found.append(one[0])
        two.replica.apply(*one)
    return found


def test_file_changed_during_reading_is_sent_again(two: Two, small_pieces: None) -> None:
    two.write({"checkpoints/1.pt": "a" * 2500})
    two.sync()
    two.write({"checkpoints/1.pt": "b" * 2500})
    assert whole(two, "checkpoints/1.pt", "c" * 2500)[-1]["drop"]
    assert two.text("checkpoints/1.pt") == "a" * 2500
    two.sync()
    assert two.text("checkpoints/1.pt") == "c" * 2500


@pytest.mark.parametrize("size", [0, 500, 1500])
def test_file_shrunk_during_reading_is_sent_again(two: Two, small_pieces: None, size: int) -> None:
    two.write({"attempts/1/error_0.json": "a" * 2500})
    frames = two.changes.small(iter(["attempts/1/error_0.json"]))
    two.replica.apply(*next(frames))
    os.truncate(two.there / "attempts/1/error_0.json", size)
    for one in frames:
        two.replica.apply(*one)
    assert len(two.text("attempts/1/error_0.json")) in (1000, size)
    two.sync()
    assert two.text("attempts/1/error_0.json") == "a" * size


def test_log_shrunk_during_reading_is_sent_whole(two: Two, small_pieces: None) -> None:
    two.write({"attempts/1/rank_0.log": "a" * 2500})
    frames = two.changes.small(iter(["attempts/1/rank_0.log"]))
    two.replica.apply(*next(frames))
    os.truncate(two.there / "attempts/1/rank_0.log", 7)
    for one in frames:
        two.replica.apply(*one)
    two.sync()
    assert two.text("attempts/1/rank_0.log") == "a" * 7


def test_hole_of_a_sparse_log_file_is_not_sent(two: Two) -> None:
    two.write({"attempts/1/rank_0.log": "begin"})
    with open(two.there / "attempts/1/rank_0.log", "r+b") as log:
        log.seek(1 << 22)
        log.write(b"end")
    two.sync()
    assert sum(len(one["data"]) for one in two.frames) < 1 << 20
    assert (two.here / "attempts/1/rank_0.log").read_bytes() == (two.there / "attempts/1/rank_0.log").read_bytes()


def test_unreadable_file_is_excluded_with_one_note(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.sync()
    two.write({"outputs/mine": "x", "attempts/1/error_0.json": "x", "attempts/1/rank_0.log": "x"})

    def refused(top: str, name: str) -> int:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(changes_module, "open_below", refused)
    two.sync()
    two.sync(final=True)
    two.sync(final=True)
    left = [(one["file"], one["why"]) for one in two.frames if one["how"] == "left"]
    assert left == [
        ("attempts/1/error_0.json", "a file that can't be read: Permission denied"),
        ("outputs/mine", "a file that can't be read: Permission denied"),
    ]


def test_requested_run_state_file_is_marked_as_final_if_its_status_is_terminal(two: Two) -> None:
    two.write({"state.json": json.dumps({"status": "Completed"})})
    header, data, is_end = two.changes.record(["Completed"])
    two.write({"state.json": json.dumps({"status": "Running"})})
    assert (header["file"], json.loads(data), is_end) == ("state.json", {"status": "Completed"}, True)
    assert two.changes.record(["Completed"])[0]["stamp"] != header["stamp"]


NAMES = (
    "outputs/a",
    "outputs/b",
    "outputs/d/x",
    "outputs/d/y",
    "outputs/e/f/g",
    "checkpoints/1",
    "attempts/1/start_0.json",
)
LOGS = ("logs/driver.log", "attempts/1/rank_0.log")
TARGETS = ("a", "d", "b", "../checkpoints/1", "../work/w", "zz", "/etc/passwd")


def change_something(rnd: random.Random, top: Path) -> None:
    name = rnd.choice((*NAMES, *LOGS))
    path, text = top / name, bytes(rnd.choices(b"abc", k=rnd.choice([0, 1, 6, 7, 8, 30])))
    for above in [*path.relative_to(top).parents][-2::-1]:
        if not (top / above).is_dir() or (top / above).is_symlink():
            (top / above).unlink(missing_ok=True)
            (top / above).mkdir()
    if name in LOGS:
        if path.exists() and rnd.random() < 0.3:
            # Keep the old file under another name, so that the new file can't get its inode number.
            os.link(path, path.with_name(f".old{rnd.random()}"))
            path.with_name(".beside").write_bytes(text)
            os.replace(path.with_name(".beside"), path)
        else:
            with open(path, "ab") as file:
                file.write(text)
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = rnd.choice(
        ("file", "file", "gone") if name.startswith("attempts") else ("file", "file", "link", "dir", "gone")
    )
    if kind == "file":
        path.write_bytes(text)
    elif kind == "link":
        path.symlink_to(rnd.choice(TARGETS))
    elif kind == "dir":
        path.mkdir()


@pytest.mark.parametrize("is_asked", [False, True], ids=["tells", "is-asked"])
def test_random_changes_leave_both_folders_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """Also if the other side keeps its state and asks again and again, and the answer breaks off anywhere."""
    monkeypatch.setattr(changes_module, "QUIET_S", 0.0)
    monkeypatch.setattr(changes_module, "CHUNK_BYTES", 7)
    for seed in range(60):
        rnd, two = random.Random(seed), Two(tmp_path / str(seed))
        two.write({"work/w": "w"})
        for step in range(8):
            for _ in range(rnd.randrange(6)):
                change_something(rnd, two.there)
            if is_asked:
                two.changes = Changes(str(two.there), json.loads(json.dumps(two.replica.known)))
            frames = [*two.changes.small(small_names(str(two.there))), *two.changes.large(step >= 6)]
            for one in frames[: rnd.randrange(len(frames) + 1) if is_asked and step < 6 else None]:
                assert one is not None
                two.replica.apply(*one)
        wanted, found = {}, {}
        for folder in LARGE:
            for entry in entries(str(two.there), folder):
                if entry.kind == "left" or entry.name == folder:
                    continue
                wanted[entry.name] = (two.there / entry.real).read_bytes() if entry.kind == "file" else entry.target
        for path in two.here.rglob("*"):
            name = str(path.relative_to(two.here))
            if name.split("/", maxsplit=1)[0] in LARGE and name not in LARGE:
                found[name] = os.readlink(path) if path.is_symlink() else "" if path.is_dir() else path.read_bytes()
        assert found == wanted, seed
        for name in LOGS:
            if (two.there / name).exists():
                assert (two.here / name).read_bytes() == (two.there / name).read_bytes(), (seed, name)


def test_wire_and_changes_modules_have_only_python_3_6_syntax() -> None:
    for module in (wire, changes_module):
        assert module.__file__ is not None
        text = Path(module.__file__).read_text()
        assert "__future__" not in text
        ast.parse(text, feature_version=(3, 6))
