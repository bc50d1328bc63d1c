"""What one machine records of a run's folder, another replays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.targets.ray.delta import DeltaRecorder, end_part, ends, replay

NASTY = "a b;$(touch x) 'q' \"d\" \udcff"


class Two:
    """A folder there, and the same here, replayed part by part."""

    def __init__(self, top: Path, part_bytes: int = 1 << 20) -> None:
        self.there, self.here = top / "there", top / "here"
        self.there.mkdir()
        self.here.mkdir()
        self.recorder = DeltaRecorder(self.there, part_bytes)
        self.parts = 0

    def write(self, name: str, text: str, *, age_s: float = 10.0) -> None:
        path = self.there / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        stamp = path.stat().st_mtime - age_s
        os.utime(path, (stamp, stamp))

    def sync(self, *, is_final: bool = False) -> int:
        """The bytes of all parts that there are."""
        total = 0
        while (part := self.recorder.part(is_final=is_final)) is not None:
            assert not replay(part, self.here)
            self.parts += 1
            total += len(part)
        return total

    def text(self, name: str) -> str:
        return (self.here / name).read_text()


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_a_log_that_grows_is_sent_by_what_has_come_to_it(two: Two) -> None:
    two.write("logs/driver.log", "x" * 10_000)
    two.sync()
    with open(two.there / "logs/driver.log", "a") as log:
        log.write("one more line\n")
    assert two.sync() < 200
    assert two.text("logs/driver.log") == "x" * 10_000 + "one more line\n"
    assert two.sync() == 0


def test_a_log_that_began_anew_does_so_here(two: Two) -> None:
    two.write("attempts/1/rank_0.log", "long " * 10)
    two.sync()
    two.write("attempts/1/rank_0.log", "new")
    two.sync()
    assert two.text("attempts/1/rank_0.log") == "new"


def test_an_empty_log_is_a_log(two: Two) -> None:
    two.write("attempts/1/rank_0.log", "")
    two.sync()
    assert two.text("attempts/1/rank_0.log") == ""


def test_files_links_and_folders_come_whole(two: Two) -> None:
    two.write(f"outputs/{NASTY}/model", "weights")
    (two.there / "outputs/empty").mkdir()
    (two.there / "logs").mkdir()
    (two.there / "logs/rank_0.log").symlink_to("../attempts/1/rank_0.log")
    os.chmod(two.there / f"outputs/{NASTY}/model", 0o750)
    two.sync()
    model = two.here / f"outputs/{NASTY}/model"
    assert model.read_text() == "weights"
    assert model.stat().st_mode & 0o777 == 0o750
    assert model.stat().st_mtime_ns == (two.there / f"outputs/{NASTY}/model").stat().st_mtime_ns
    assert (two.here / "outputs/empty").is_dir()
    assert os.readlink(two.here / "logs/rank_0.log") == "../attempts/1/rank_0.log"


def test_a_file_that_is_being_written_waits_until_it_rests(two: Two) -> None:
    two.write("checkpoints/1.pt", "half", age_s=0.0)
    two.sync()
    assert not (two.here / "checkpoints/1.pt").exists()
    two.sync(is_final=True)
    assert two.text("checkpoints/1.pt") == "half"


def test_a_large_file_goes_in_pieces_and_logs_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.targets.ray.delta._CHUNK_BYTES", 1000)
    two = Two(tmp_path, part_bytes=1500)
    two.write("checkpoints/1.pt", "abcdefghi" * 1000)
    part = two.recorder.part()
    assert part is not None
    assert len(part) < 3000
    replay(part, two.here)
    assert not (two.here / "checkpoints/1.pt").exists()
    two.write("logs/driver.log", "meanwhile")
    part = two.recorder.part()
    assert part is not None
    replay(part, two.here)
    assert two.text("logs/driver.log") == "meanwhile"
    two.sync()
    assert two.text("checkpoints/1.pt") == "abcdefghi" * 1000
    assert [path.name for path in (two.here / "checkpoints").iterdir()] == ["1.pt"]


def test_a_checkpoint_that_was_removed_there_goes_here(two: Two) -> None:
    two.write("checkpoints/1.pt", "a")
    two.sync()
    (two.there / "checkpoints/1.pt").unlink()
    two.sync()
    assert not (two.here / "checkpoints/1.pt").exists()


def test_the_end_of_the_run_comes_last_of_all(two: Two) -> None:
    two.write("run.json", json.dumps({"status": "Running"}))
    two.write("outputs/model", "m")
    two.sync()
    two.write("run.json", json.dumps({"status": "Completed"}))
    two.write("outputs/late", "l", age_s=0.0)
    two.sync()
    assert "Running" in two.text("run.json")
    two.sync(is_final=True)
    assert "Completed" in two.text("run.json")
    assert two.text("outputs/late") == "l"


def test_what_is_the_machines_own_stays_there(two: Two) -> None:
    for name in ("lock", "ballast", "engine.json", "target.json", "cancel.json", "attempts/1/rank_0.held", ".hidden"):
        two.write(name, "x")
    (two.there / "snapshot").symlink_to("elsewhere")
    two.sync(is_final=True)
    assert [path.name for path in two.here.rglob("*") if not path.is_dir()] == []


def test_notes_of_both_sides_are_kept(two: Two) -> None:
    two.write("notes.jsonl", '{"at": "there"}\n')
    (two.here / "notes.jsonl").write_text('{"at": "here"}\n')
    two.sync()
    assert two.text("notes.jsonl") == '{"at": "here"}\n{"at": "there"}\n'


def test_what_was_sent_at_the_start_is_not_sent_back(two: Two) -> None:
    two.write("events.jsonl", "first\n")
    (two.here / "events.jsonl").write_text("first\n")
    two.recorder.skip_present()
    assert two.sync() == 0
    with open(two.there / "events.jsonl", "a") as events:
        events.write("second\n")
    two.sync()
    assert two.text("events.jsonl") == "first\nsecond\n"


def test_a_part_replayed_twice_changes_nothing(two: Two) -> None:
    two.write("logs/driver.log", "line\n")
    two.write("outputs/model", "m")
    part = two.recorder.part()
    assert part is not None
    for _ in range(2):
        replay(part, two.here)
    assert (two.text("logs/driver.log"), two.text("outputs/model")) == ("line\n", "m")


def test_the_last_part_says_so(two: Two) -> None:
    assert ends(end_part())
    assert replay(end_part(), two.here)
    two.write("logs/driver.log", "x")
    part = two.recorder.part()
    assert part is not None
    assert not ends(part)


def test_the_record_is_put_in_its_place_by_who_knows_it(two: Two) -> None:
    two.write("run.json", "{}")
    two.write("outputs/run.json", "mine")
    part, taken = two.recorder.part(), []
    assert part is not None
    replay(part, two.here, taken.append)
    assert taken == [b"{}"]
    assert (two.text("outputs/run.json"), sorted(os.listdir(two.here))) == ("mine", ["outputs"])


def test_a_folder_takes_the_place_of_a_link_of_the_users(two: Two) -> None:
    two.write("uploads/model/real/a", "a")
    (two.there / "uploads/model/link").symlink_to("real")
    two.sync()
    assert (two.here / "uploads/model/link").is_symlink()
    (two.there / "uploads/model/link").unlink()
    two.write("uploads/model/link/a", "a")
    two.sync()
    assert two.text("uploads/model/link/a") == "a"
    assert not (two.here / "uploads/model/link").is_symlink()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a//b"])
def test_a_name_that_leads_outside_is_refused(two: Two, name: str) -> None:
    header = json.dumps({"path": name, "at": 0, "bytes": 1}).encode()
    with pytest.raises(ValueError, match="none of a file below"):
        replay(len(header).to_bytes(4, "big") + header + b"x", two.here)


def test_nothing_is_written_through_a_link(two: Two, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (two.here / "logs").symlink_to(tmp_path / "outside")
    two.write("logs/driver.log", "x")
    with pytest.raises(ValueError, match="behind a link"):
        two.sync()


def test_a_link_that_leads_outside_is_left_out(two: Two) -> None:
    (two.there / "outputs").mkdir()
    (two.there / "outputs/out").symlink_to("../../../etc")
    (two.there / "outputs/abs").symlink_to("/etc")
    two.sync()
    assert list((two.here / "outputs").iterdir()) == []


def test_a_link_to_the_runs_own_files_arrives_as_one_or_as_the_file(two: Two) -> None:
    for name in ("outputs/step/a", "checkpoints/9.pt", "work/w"):
        two.write(name, name)
    for name, target in {"latest": two.there / "outputs/step", "best": "../checkpoints/9.pt", "w": "../work/w"}.items():
        (two.there / "outputs" / name).symlink_to(target)
    os.mkfifo(two.there / "outputs/pipe")
    two.sync(is_final=True)
    found = {path.name: os.readlink(path) if path.is_symlink() else "" for path in (two.here / "outputs").iterdir()}
    assert found == {"step": "", "latest": "step", "best": "../checkpoints/9.pt", "w": ""}
    assert two.text("outputs/w") == "work/w"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("outputs/x", "/etc"),
        ("outputs/x", "../../x"),
        ("outputs/x", "../run.json"),
        ("outputs/a/b", "d/../../../../x"),
        ("metrics/x", "../outputs/x"),
        ("outputs", "checkpoints"),
    ],
)
def test_a_part_with_a_link_that_leads_out_is_refused(two: Two, name: str, target: str) -> None:
    header = json.dumps({"path": name, "link": target, "bytes": 0}).encode()
    with pytest.raises(ValueError, match="leads out of the run's folder"):
        replay(len(header).to_bytes(4, "big") + header, two.here)
    assert not any(path.is_symlink() for path in two.here.rglob("*"))


@pytest.mark.parametrize("name", ["lock", "target.json", "home.json", "engine.json", ".travel.json"])
def test_what_is_of_this_machine_alone_is_taken_from_nobody(two: Two, name: str) -> None:
    header = json.dumps({"path": name, "at": 0, "bytes": 1}).encode()
    with pytest.raises(ValueError, match="none that comes from the other side"):
        replay(len(header).to_bytes(4, "big") + header + b"x", two.here)


def test_half_a_part_is_no_part(two: Two) -> None:
    two.write("logs/driver.log", "x" * 100)
    part = two.recorder.part()
    assert part is not None
    with pytest.raises(ValueError, match="cut short"):
        replay(part[:-1], two.here)
