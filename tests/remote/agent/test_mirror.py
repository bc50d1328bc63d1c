from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.remote.agent import mirror
from paceline.remote.agent.mirror import Mirror
from paceline.remote.agent.send_queue import BULK
from paceline.remote.replica import changes
from paceline.remote.wire import CHUNK_BYTES
from paceline.system import gaps
from tests.helpers import wait_until, write_tree


class Sent:
    """Stands for the connection to the supervisor: keeps the sent files. on_part: called with each piece of a file."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.on_part = lambda header: None

    def put(self, header: dict[str, Any], data: bytes = b"", *, kind: int = 0, wait: bool = False) -> None:
        self.frames.append({**header, "kind": kind, "data": data})
        if header.get("how") == "part":
            self.on_part(header)

    def has_room(self, kind: int) -> bool:
        return True

    def of(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.frames if one.get("file") == name]


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return write_tree(
        tmp_path / "run", {"metrics/rank_0.jsonl": "1\n", "attempts/1/rank_0.log": "", "checkpoints/.k": ""}
    )


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """Starts mirrors that wait for nothing; they are closed in the end."""
    monkeypatch.setattr(mirror, "LOOK_S", 0.0)
    monkeypatch.setattr(changes, "QUIET_S", 0.0)
    monkeypatch.setattr(mirror, "SURVEY_S", 0.0)
    running = []

    def start_one(top: Path, sent: Sent, have: dict[str, list[int]] | None = None) -> Mirror:
        one = Mirror(str(top), 1, have or {}, True, sent)  # type: ignore[arg-type]
        running.append(one)
        one.start()
        return one

    yield start_one
    for one in running:
        one.close()
        one.join()


def test_new_log_lines_are_sent_between_chunks_of_a_large_file(top, start):
    sent = Sent()
    (top / "checkpoints/large").write_bytes(bytes(8 * CHUNK_BYTES))

    def on_part(header):
        if len(sent.of("checkpoints/large")) == 2:
            with open(top / "metrics/rank_0.jsonl", "a") as file:
                file.write("2\n")

    sent.on_part = on_part
    start(top, sent)
    wait_until(lambda: [one for one in sent.of("checkpoints/large") if one.get("end")], "the file")
    order = [one["file"] for one in sent.frames if one["data"] and one.get("file")]
    last_line = len(order) - 1 - order[::-1].index("metrics/rank_0.jsonl")
    assert "checkpoints/large" in order[:last_line]
    assert "checkpoints/large" in order[last_line:]
    assert {one["kind"] for one in sent.of("checkpoints/large")} == {BULK}


def test_file_changed_during_reading_is_sent_again(top, start):
    sent = Sent()
    path = top / "checkpoints/large"
    path.write_bytes(bytes(3 * CHUNK_BYTES))

    def on_part(header):
        if header["file"] == "checkpoints/large" and len(sent.of("checkpoints/large")) == 1:
            path.write_bytes(b"1" * (3 * CHUNK_BYTES))
            os.utime(path, (1, 1))

    sent.on_part = on_part
    start(top, sent)
    wait_until(lambda: [one for one in sent.of("checkpoints/large") if one.get("end")], "the file")
    frames = sent.of("checkpoints/large")
    keys = {one["key"]: "drop" if one.get("drop") else "end" for one in frames if one.get("drop") or one.get("end")}
    assert list(keys.values()) == ["drop", "end"]
    last = [one["data"] for one in frames if one["key"] == max(keys)]
    assert b"".join(last) == b"1" * (3 * CHUNK_BYTES)


def test_appended_bytes_of_a_log_are_sent_alone_and_a_truncated_log_is_sent_whole(top, start):
    sent, log = Sent(), top / "attempts/1/rank_0.log"
    start(top, sent)
    for text in ("one\n", "two\n"):
        with open(log, "a") as file:
            file.write(text)
        wait_until(
            lambda text=text: any(one["data"] == text.encode() for one in sent.of("attempts/1/rank_0.log")), text
        )
    os.truncate(log, 2)
    wait_until(lambda: sent.of("attempts/1/rank_0.log")[-1]["data"] == b"on", "the rest")
    found = [(one["at"], one["cut"], one["data"]) for one in sent.of("attempts/1/rank_0.log")]
    assert found == [(0, "new", b"one\n"), (4, "", b"two\n"), (0, "shrunk", b"on")]


def test_agent_does_not_send_files_that_the_supervisor_already_has(top, start):
    sent = Sent()
    found = os.stat(write_tree(top, {"outputs/o": "o"}) / "outputs/o")
    one = start(top, sent, {"outputs/o": [1, found.st_mtime_ns, 0], "metrics/rank_0.jsonl": [2, 0, 0]})
    one.tell({"re": 1, "all": True})
    wait_until(lambda: {"re": 1, "kind": BULK, "data": b""} in sent.frames, "the answer")
    assert sent.of("outputs/o") == sent.of("metrics/rank_0.jsonl") == []


def test_temporary_files_are_not_sent_and_worker_exit_files_are_sent_last(top, start):
    sent = Sent()
    write_tree(
        top, {"attempts/1/error_0.held": "x", "attempts/1/.start_0.json.1": "{", "attempts/1/start_0.json": "{}"}
    )
    one = start(top, sent)
    (top / "attempts/1/end_0.json").write_text("{}")
    one.tell({"op": "end"})
    wait_until(lambda: any(frame.get("op") == "end" for frame in sent.frames), "the end")
    before = [frame.get("file") for frame in sent.frames[: [frame.get("op") for frame in sent.frames].index("end")]]
    before = [name for name in before if name and not name.startswith("checkpoints")]
    assert "attempts/1/end_0.json" in before
    assert not [name for name in before if (name.endswith(".held") or "/." in name)]


def test_files_that_a_script_writes_to_logs_are_sent_but_supervisor_files_are_not(top, start):
    sent = Sent()
    write_tree(
        top, {"logs/plots/a.txt": "mine", "logs/rank_0.log": "x", "events.jsonl": "x", "attempts/1/exec_0a.jsonl": "x"}
    )
    flushed(start(top, sent), sent)
    names = {one["file"] for one in sent.frames if one.get("data")}
    assert names == {"logs/plots/a.txt", "attempts/1/exec_0a.jsonl", "metrics/rank_0.jsonl"}


def test_removed_checkpoint_is_reported_as_gone(top, start):
    sent = Sent()
    path = top / "checkpoints/old"
    path.write_bytes(b"x")
    start(top, sent)
    wait_until(lambda: sent.of("checkpoints/old"), "the file")
    stamp = [1, os.stat(path).st_mtime_ns, os.stat(path).st_ino]
    path.unlink()
    wait_until(lambda: [one["how"] for one in sent.of("checkpoints/old")] == ["part", "gone"], "that it is gone")
    assert sent.of("checkpoints/old")[-1]["stamp"] == stamp


def flushed(one: Mirror, sent: Sent) -> None:
    one.tell({"re": 1, "all": True})
    wait_until(lambda: any(frame.get("re") == 1 for frame in sent.frames), "all that there is")


def test_agent_sends_symlinks_inside_the_run_and_excludes_outside_and_dangling_ones_with_the_reason(
    top, start, tmp_path
):
    write_tree(tmp_path, {"mine": "secret"})
    write_tree(top, {"outputs/step/a": "1", "work/w": "w", "checkpoints/9.pt": "nine"})
    for name, target in {
        "latest": top / "outputs/step",
        "best": "../checkpoints/9.pt",
        "w": "../work/w",
        "mine": tmp_path / "mine",
        "dangling": "gone",
    }.items():
        (top / "outputs" / name).symlink_to(target)
    os.mkfifo(top / "outputs/pipe")
    sent = Sent()
    flushed(start(top, sent), sent)
    told = {one["file"]: one.get("target") or one.get("why") or one["data"] for one in sent.frames if "how" in one}
    assert {name: told[f"outputs/{name}"] for name in ("latest", "best", "w", "mine", "dangling", "pipe")} == {
        "latest": "step",
        "best": "../checkpoints/9.pt",
        "w": b"w",
        "mine": f"a link that leads out of the run, to {str(tmp_path / 'mine')!r}",
        "dangling": "a link to 'gone', where there is nothing",
        "pipe": "a pipe",
    }
    assert not [one for one in sent.frames if b"secret" in one["data"]]


@pytest.mark.parametrize("name", ["outputs/a", "metrics/rank_0.jsonl"])
def test_file_replaced_by_a_symlink_is_not_followed(top, start, tmp_path, monkeypatch, name):
    """As a script in a container may try, which sees less of the node than its agent does."""
    write_tree(tmp_path, {"mine": "secret"})
    write_tree(top, {"outputs/a": "1"})
    real = changes.open_below

    def swapped(folder: str, asked: str) -> int:
        if asked == name:
            (top / name).unlink()
            (top / name).symlink_to(tmp_path / "mine")
        return real(folder, asked)

    monkeypatch.setattr(changes, "open_below", swapped)
    sent = Sent()
    flushed(start(top, sent), sent)
    assert not [one for one in sent.frames if b"secret" in one["data"]]


def test_sent_file_replaced_by_a_symlink_to_outside_is_reported_as_gone(top, start):
    sent = Sent()
    (top / "checkpoints/a").write_text("1")
    one = start(top, sent)
    flushed(one, sent)
    # Clear the frames before the file becomes a link, because the mirror may send one while neither of them exists.
    sent.frames.clear()
    (top / "checkpoints/a").unlink()
    (top / "checkpoints/a").symlink_to("/etc/passwd")
    flushed(one, sent)
    assert {frame["how"] for frame in sent.of("checkpoints/a")} == {"left", "gone"}


def test_unsupported_hole_punching_is_reported_once(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def punch(fd: int, gap: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(gaps, "_punch", punch)
    monkeypatch.setattr(mirror, "LOOK_S", 0.0)
    (top / "logs").mkdir()
    log, sent = top / "attempts/1/rank_0.log", Sent()
    log.write_text("line\n" * 100_000)
    one = Mirror(str(top), 1, {}, False, sent, gaps.LEAST_LIMIT)  # type: ignore[arg-type]
    one.start()
    wait_until(lambda: sent.of("logs/driver.log"), "it is told")
    with open(log, "a") as file:
        file.write("line\n" * 100_000)
    wait_until(lambda: sum(len(frame["data"]) for frame in sent.of("attempts/1/rank_0.log")) == 1_000_000, "all came")
    one.close()
    one.join()
    said = b"".join(frame["data"] for frame in sent.of("logs/driver.log")).decode()
    assert (
        said.count("rank 0's log is kept whole on its node: the file system there can't leave anything out of it") == 1
    )
    assert said.endswith("(Operation not supported)\n")
    assert not (top / "attempts/1/gap_0.json").exists()


def test_empty_log_is_sent_only_with_all_files(top, start):
    sent = Sent()
    running = start(top, sent)
    running.tell({"op": "end"})
    wait_until(lambda: any(one.get("op") == "end" for one in sent.frames), "the end of a command")
    assert sent.of("metrics/rank_0.jsonl")
    assert not sent.of("attempts/1/rank_0.log")
    running.tell({"re": 1, "all": True})
    wait_until(lambda: any(one.get("re") == 1 for one in sent.frames), "the answer")
    (log,) = sent.of("attempts/1/rank_0.log")
    assert (log["how"], log["cut"], log["data"]) == ("grow", "new", b"")
