"""What one machine records of a run's folder in parts, another replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.remote.replica import changes
from paceline.remote.replica.apply import Replica
from paceline.remote.wire import frame
from paceline.targets.ray.delta import DeltaRecorder, end_part, ends, replay
from tests.helpers import write_tree


class Two:
    """A folder there, and the same here, replayed part by part."""

    def __init__(self, top: Path, part_bytes: int = 1 << 20) -> None:
        self.there, self.here = write_tree(top / "there", {"checkpoints/.k": ""}), top / "here"
        self.here.mkdir()
        self.recorder = DeltaRecorder(self.there, part_bytes)
        self.replica = self.reader()

    def reader(self) -> Replica:
        """Each look at a run is another process."""
        return Replica(self.here, (self.here / "state.json").write_bytes)

    def write(self, name: str, text: str) -> None:
        write_tree(self.there, {name: text})

    def part(self) -> bytes:
        part = self.recorder.part()
        assert part is not None
        return part

    def sync(self, *, is_final: bool = False) -> int:
        """The bytes of all parts that there are."""
        total = 0
        while (part := self.recorder.part(is_final=is_final)) is not None:
            assert not replay(part, self.reader())
            total += len(part)
        return total

    def text(self, name: str) -> str:
        return (self.here / name).read_text()


@pytest.fixture(autouse=True)
def everything_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "QUIET_S", 0.0)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_only_the_appended_bytes_of_a_growing_log_are_sent(two: Two) -> None:
    two.write("logs/driver.log", "x" * 10_000)
    two.sync()
    with open(two.there / "logs/driver.log", "a") as log:
        log.write("one more line\n")
    assert two.sync() < 200
    assert two.text("logs/driver.log") == "x" * 10_000 + "one more line\n"
    assert two.sync() == 0


def test_large_file_is_split_and_logs_are_sent_between_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "CHUNK_BYTES", 1000)
    two = Two(tmp_path, part_bytes=1500)
    two.write("checkpoints/1.pt", "abcdefghi" * 1000)
    part = two.part()
    assert len(part) < 3000
    replay(part, two.reader())
    assert not (two.here / "checkpoints/1.pt").exists()
    two.write("logs/driver.log", "meanwhile")
    replay(two.part(), two.reader())
    assert two.text("logs/driver.log") == "meanwhile"
    two.sync()
    assert two.text("checkpoints/1.pt") == "abcdefghi" * 1000
    two.reader().close()
    assert sorted(path.name for path in two.here.iterdir()) == ["checkpoints", "logs"]


def test_run_files_received_twice_from_a_ray_cluster_equal_files_received_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was killed between the replay and its note; also with the last piece of a file that is whole by then."""
    monkeypatch.setattr(changes, "CHUNK_BYTES", 1000)
    two = Two(tmp_path, part_bytes=1500)
    two.write("logs/driver.log", "line\n")
    two.write("checkpoints/1.pt", "abcdefghi" * 1000)
    while (part := two.recorder.part(is_final=True)) is not None:
        for _ in range(2):
            replay(part, two.reader())
    assert (two.text("logs/driver.log"), two.text("checkpoints/1.pt")) == ("line\n", "abcdefghi" * 1000)


def test_final_status_of_a_run_is_sent_after_all_its_files(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.write("state.json", json.dumps({"status": "Running"}))
    two.write("outputs/model", "m")
    two.sync()
    assert (two.sync(), two.text("outputs/model")) == (0, "m")
    two.write("state.json", json.dumps({"status": "Completed"}))
    monkeypatch.setattr(changes, "QUIET_S", 600.0)
    two.write("outputs/late", "l")
    two.write("work/left", "by the script")
    two.sync()
    assert not (two.here / "work").exists()
    assert "Running" in two.text("state.json")
    two.sync(is_final=True)
    assert "Completed" in two.text("state.json")
    assert (two.text("outputs/late"), two.text("work/left")) == ("l", "by the script")


def test_files_sent_at_the_start_are_not_sent_back(two: Two) -> None:
    for name in ("events.jsonl", "state.json", "logs/driver.log"):
        two.write(name, "{}\n")
    (two.here / "events.jsonl").write_text("{}\n")
    two.recorder.skip_present()
    two.sync()
    two.reader().close()
    assert sorted(path.name for path in two.here.iterdir()) == ["checkpoints", "events.jsonl"]
    with open(two.there / "events.jsonl", "a") as events:
        events.write("second\n")
    two.sync()
    assert two.text("events.jsonl") == "{}\nsecond\n"


def test_returned_run_files_are_complete_only_after_the_last_message(two: Two) -> None:
    assert ends(end_part())
    assert replay(end_part(), two.replica)
    two.write("logs/driver.log", "x")
    assert not ends(two.part())


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (frame({"file": "logs/driver.log", "how": "grow", "at": 0, "ino": 1, "cut": ""}, b"x" * 100)[:-1], "cut short"),
        (frame({"file": "../x", "how": "dir", "stamp": [0, 0, 0]}), "not that of a file below"),
        (frame({"path": "logs/driver.log", "at": 0}, b"x"), "not a change of a file"),
        (b"not Paceline's", "a header of"),
    ],
)
def test_invalid_message_with_returned_run_files_is_refused_and_writes_no_file(two: Two, part: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replay(part, two.replica)
    assert [path.name for path in two.here.rglob("*")] == []
