from __future__ import annotations

import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runs import logs
from paceline.runs.folder import RunFolder
from paceline.runs.logs import AttemptLog, LineAssembler, LogFollower, LogLine, last_lines
from paceline.supervisor.logs import shorten_logs
from paceline.system import gaps
from tests.helpers import write_tree


def assembled(*pieces: bytes) -> list[str]:
    lines = LineAssembler()
    found = [text for piece in pieces for text in lines.feed(piece)]
    return [*found, *lines.end()]


# --- Lines of one rank


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([], []),
        ([b""], []),
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a\nb"], ["a", "b"]),
        ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
        ([b"\n\na\n\n"], ["", "", "a", ""]),
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb"], ["a", "b"]),
        ([b"\r10%\r50%\r100%\n"], ["100%"]),
        ([b"10%\r50%\r100%\r\n"], ["100%"]),
        ([b"10%\r", b"50%\r", b"100%\ndone\n"], ["100%", "done"]),
        ([b"10%\r50%"], ["50%"]),
        ([b"10%\r"], ["10%"]),
        ([b"\r\n\r\r\n"], ["", ""]),
        ([b"gr\xc3\xb6", b"\xc3\x9fe\n"], ["größe"]),
        ([b"gr\xc3", b"\xb6\xc3", b"\x9fe\n"], ["größe"]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"\xc3"], ["\ufffd"]),
        ([b"nul\0\n"], ["nul\0"]),
        ([b"\x1b[31mred\x1b[0m\n"], ["\x1b[31mred\x1b[0m"]),
        ([b"form\x0cfeed\x0b\x1c\xe2\x80\xa8\n"], ["form\x0cfeed\x0b\x1c\u2028"]),
    ],
    ids=repr,
)
def test_log_bytes_are_split_into_lines(pieces, lines):
    assert assembled(*pieces) == lines


@given(
    st.binary(max_size=60).map(lambda data: data.replace(b"\0", b"\n").replace(b"\x01", b"\r")),
    st.lists(st.integers(0, 60)),
)
def test_log_is_split_into_the_same_lines_for_any_chunking_of_its_bytes(data, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(edges)]
    assert assembled(*pieces) == assembled(data)
    blocks = LineAssembler()
    found = [text for piece in pieces for text in blocks.feed_blocks(piece)]
    # Only the last line of the log may be incomplete. So the returned blocks and the remaining text together have all
    # lines.
    assert "\n".join([*found, *blocks.end()]) == "\n".join(assembled(data))


def test_endless_line_uses_bounded_memory():
    # 64 MiB are enough to show that the memory does not grow with the line.
    lines, chunk, size = LineAssembler(), b"x" * (1 << 16), 0
    tracemalloc.start()
    try:
        for _ in range(1024):
            for text in lines.feed(chunk):
                assert len(text) <= 1 << 16
                size += len(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size += sum(map(len, lines.end()))
    assert size == 64 << 20
    assert peak < 2 << 20


def test_endless_progress_bar_uses_bounded_memory():
    lines = LineAssembler()
    tracemalloc.start()
    try:
        bar = b"".join(b"\r%d%%" % number for number in range(10_000))
        shown = [text for _ in range(100) for text in lines.feed(bar)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (shown, list(lines.end())) == ([], ["9999%"])
    assert peak < 2 << 20


def test_a_long_line_of_unicode_is_cut_between_characters():
    text = "ö" * 100_000
    pieces = assembled(b"x" + text.encode() + b"\n")
    assert "".join(pieces) == "x" + text


def test_unfinished_line_is_shown_after_a_delay(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    lines = LineAssembler()
    assert list(lines.feed(b"Continue? [y/n] ")) == []
    assert list(lines.overdue()) == []
    now[0] = 10
    assert list(lines.overdue()) == ["Continue? [y/n] "]
    assert list(lines.overdue()) == []
    assert list(lines.feed(b"y\nnext\n")) == ["y", "next"]


def test_changing_progress_bar_is_shown_at_intervals_and_no_state_is_shown_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    lines, shown = LineAssembler(), []
    for number in range(9):
        now[0] = number * 0.6 * logs._PATIENCE_S
        assert [*lines.feed(b"\r%d0%%" % number), *lines.overdue()] == []
        shown.append(lines.unfinished())
    assert shown == [None, None, "20%", None, "40%", None, "60%", None, "80%"]
    assert lines.unfinished() is None
    # The end of the line equals the progress that was shown last, so it is not shown again.
    assert list(lines.feed(b"\nnext\n")) == ["next"]


def test_last_state_of_a_progress_bar_is_always_shown(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    lines = LineAssembler()
    list(lines.feed(b"\r50%"))
    now[0] = 10
    assert lines.unfinished() == "50%"
    assert list(lines.feed(b"\r100%\n")) == ["100%"]


NOISE = "[W1122 16:58:12.345678901 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3"


@pytest.mark.parametrize("noise", [NOISE, f"[rank1]:{NOISE}", NOISE.replace("1122 16:58:12.345678901 ", " ")])
def test_torch_redirect_warning_is_filtered(tmp_path, noise):
    # Regression: on hosts without name servers, this warning of torch was the first line in the log of each rank.
    assert list(LineAssembler().feed(f"a\n{noise}\nb\n".encode())) == ["a", "b"]
    (tmp_path / "log").write_text(f"a\n{noise}\nb\n")
    assert last_lines(tmp_path / "log", 5) == ["a", "b"]


@pytest.mark.parametrize(
    "line", [f"loss 1 {NOISE}", f"{NOISE} and more", NOISE.replace("hostname", "port"), f"x {NOISE}"]
)
def test_lines_that_only_contain_or_resemble_the_torch_redirect_warning_are_not_filtered(line):
    assert list(LineAssembler().feed(f"{line}\n".encode())) == [line]


# --- Logs of several ranks


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs/digits_1_1")


def attempt(folder: RunFolder, number: int, logs_of: dict[int, bytes], order: str = "") -> None:
    files = {f"rank_{rank}.log": text for rank, text in logs_of.items()}
    write_tree(folder.attempt(number), {**files, "log_order.txt": order})


def merged(folder: RunFolder, number: int, ranks: list[int]) -> list[tuple[int, str]]:
    log = AttemptLog(folder, number, ranks)
    found = [(line.rank, line.text) for line in log.end()]
    log.close()
    return found


def test_log_lines_of_several_ranks_are_merged_in_the_order_of_the_line_order_file(folder):
    attempt(folder, 1, {0: b"a\nd\n", 1: b"b\nc\n"}, "1.0 0 2\n1.1 1 4\n1.2 0 4\n")
    assert merged(folder, 1, [0, 1]) == [(0, "a"), (1, "b"), (1, "c"), (0, "d")]


def test_log_lines_missing_in_the_line_order_file_come_last(folder):
    attempt(folder, 1, {0: b"a\nb\n", 1: b"c\n", 2: b"d\n"}, "1.0 2 2\n")
    assert merged(folder, 1, [0, 1, 2]) == [(2, "d"), (0, "a"), (0, "b"), (1, "c")]


def test_line_recorded_in_two_parts_is_shown_whole(folder):
    attempt(folder, 1, {0: b"abc\n", 1: b"d\n"}, "1.0 0 2\n1.1 1 2\n1.2 0 4\n")
    assert merged(folder, 1, [0, 1]) == [(1, "d"), (0, "abc")]


@pytest.mark.parametrize("order", ["1.0 0\n", "x\n", "1.0 zero 2\n", "1.0 7 2\n", "1.0 0 99999\n", "1.0 0 2", "\n\n"])
def test_all_log_lines_are_shown_even_if_the_line_order_file_is_broken(folder, order):
    attempt(folder, 1, {0: b"a\n", 1: b"b\n"}, order)
    assert sorted(merged(folder, 1, [0, 1])) == [(0, "a"), (1, "b")]


def test_consecutive_lines_of_one_rank_are_returned_as_one_block(folder):
    """A log of a gigabyte took 53 s line by line."""
    attempt(folder, 1, {0: b"a\nb\nc\n", 1: b"d\ne\n"}, "1.0 0 4\n1.1 1 4\n1.2 0 6\n")
    found = list(logs.lines_of(folder, [1], [0, 1], in_blocks=True))
    assert [(line.rank, line.text) for line in found] == [(0, "a\nb"), (1, "d\ne"), (0, "c")]


def test_reading_the_log_of_one_rank_returns_no_lines_of_other_ranks(folder):
    attempt(folder, 1, {0: b"a\n", 1: b"b\n"}, "1.0 1 2\n1.1 0 2\n")
    assert merged(folder, 1, [1]) == [(1, "b")]


def test_log_file_created_later_is_read_when_it_appears(folder):
    log = AttemptLog(folder, 1, [0])
    assert list(log.new()) == []
    attempt(folder, 1, {0: b"a\n"})
    assert list(log.new()) == [LogLine(1, 0, "a")]
    with open(folder.rank_log(1, 0), "ab") as file:
        file.write(b"b\nhalf")
    assert list(log.new()) == [LogLine(1, 0, "b")]
    assert list(log.end()) == [LogLine(1, 0, "half")]
    log.close()


def test_live_log_reader_gets_every_line_and_later_readers_get_the_truncated_log(folder):
    lines = [b"%07d" % number for number in range(30_000)]
    attempt(folder, 1, {0: b"", 1: b"other\n"})
    log, keeper = folder.rank_log(1, 0), gaps.Keeper(str(folder.rank_log(1, 0)), gaps.LEAST_LIMIT)
    early, live = AttemptLog(folder, 1, [0]), []
    with open(log, "ab", buffering=0) as worker, open(folder.log_order(1), "a") as order:
        for number in range(0, len(lines), 1000):
            worker.write(b"\n".join(lines[number : number + 1000]) + b"\n")
            order.write(f"1.{number} 0 {log.stat().st_size}\n")
            order.flush()
            keeper.look()
            live += [line.text for line in early.new()]
        order.write("2.0 1 6\n")
    early.close()
    assert live == [line.decode() for line in lines], "who is quick enough has every line"
    late = merged(folder, 1, [0, 1])
    texts = [text for _, text in late]
    (mark,) = [at for at, text in enumerate(texts) if "left out" in text]
    assert texts[:mark] == live[:mark]
    assert texts[mark + 1 : -1] == live[mark + 2 - len(texts) :]
    assert late[-1] == (1, "other")
    opened_before = AttemptLog(folder, 1, [0, 1])
    reader = opened_before.new()
    assert next(reader).text == texts[0]
    shorten_logs(folder, 1)
    assert log.stat().st_size <= gaps.LEAST_LIMIT + 8 * 1000
    assert merged(folder, 1, [0, 1]) == late
    assert [line.text for line in reader] == texts[1:]
    opened_before.close()


# --- Following a log while the run writes it


class Writer:
    """A run that is written step by step while it is followed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.attempts = folder, 0

    def attempt(self) -> None:
        self.attempts += 1
        self.folder.attempt(self.attempts).mkdir(parents=True)

    def write(self, rank: int, data: bytes) -> None:
        path = self.folder.rank_log(self.attempts, rank)
        with open(path, "ab") as file:
            file.write(data)
        with open(self.folder.log_order(self.attempts), "a") as order:
            order.write(f"1.0 {rank} {path.stat().st_size}\n")


def texts(lines) -> list[tuple[int, int, str]]:
    return [(line.attempt, line.rank, line.text) for line in lines]


def test_a_run_is_followed_from_its_start_across_attempts_to_its_end(folder):
    writer, follower = Writer(folder), LogFollower(folder, [0, 1])

    def new(*, is_over=False):
        return texts(follower.new(writer.attempts, is_over=is_over))

    assert new() == []
    writer.attempt()
    writer.write(0, b"before\n")
    assert new() == [(1, 0, "before")]
    writer.write(1, b"one\n")
    writer.write(0, b"half")
    assert new() == [(1, 1, "one")]
    writer.write(0, b" whole\nlost")
    assert new() == [(1, 0, "half whole")]
    writer.attempt()
    assert new() == [(1, 0, "lost")]
    writer.write(1, b"again\n")
    writer.write(0, b"end")
    assert new(is_over=True) == [(2, 1, "again"), (2, 0, "end")]
    assert new(is_over=True) == []
    follower.close()


def test_ended_run_of_many_attempts_is_shown_whole(folder):
    for number in (1, 2, 3):
        attempt(folder, number, {0: b"attempt %d" % number})
    follower = LogFollower(folder, [0])
    assert texts(follower.new(3, is_over=True)) == [(1, 0, "attempt 1"), (2, 0, "attempt 2"), (3, 0, "attempt 3")]
    follower.close()


@pytest.mark.parametrize("attempts", [0, 1, 3])
def test_following_a_run_without_log_files_yields_no_lines(folder, attempts):
    follower = LogFollower(folder, [0, 1])
    assert texts(follower.new(attempts, is_over=True)) == []
    follower.close()


def test_unfinished_state_of_a_progress_bar_is_marked_as_incomplete(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    attempt(folder, 1, {0: b"start\n10%\r50%"})
    follower = LogFollower(folder, [0])
    assert list(follower.new(1, is_over=False)) == [LogLine(1, 0, "start")]
    now[0] = 10
    assert list(follower.new(1, is_over=False)) == [LogLine(1, 0, "50%", complete=False)]
    assert list(follower.new(1, is_over=True)) == []
    follower.close()


def test_follower_shows_each_log_line_once_while_another_thread_writes(folder):
    writer, follower = Writer(folder), LogFollower(folder, [0, 1])
    writer.attempt()

    def write():
        for number in range(2000):
            writer.write(number % 2, b"%d\n" % number)

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    while thread.is_alive():
        seen += follower.new(1, is_over=False)
    seen += follower.new(1, is_over=True)
    follower.close()
    for rank in (0, 1):
        assert [int(line.text) for line in seen if line.rank == rank] == list(range(rank, 2000, 2))


# --- The last lines of a log


@pytest.mark.parametrize(
    ("text", "count", "lines"),
    [
        (b"", 5, []),
        (b"\n\n \n", 5, []),
        (b"a\nb\nc\n", 2, ["b", "c"]),
        (b"a\nb\nc", 5, ["a", "b", "c"]),
        (b"a\n\nb\n\n\n", 5, ["a", "", "b"]),
        (b"10%\r100%\nend\r\n", 2, ["100%", "end"]),
        (b"\xff\n", 1, ["\ufffd"]),
        (b"x" * 5000 + b"\n", 1, ["x" * logs._LONGEST_SHOWN]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_last_lines_returns_at_most_the_requested_number_of_lines_without_trailing_blank_lines(
    tmp_path: Path, text, count, lines
):
    (tmp_path / "log").write_bytes(text)
    assert last_lines(tmp_path / "log", count) == lines


def test_last_lines_of_a_large_log_begin_with_a_whole_line(tmp_path):
    (tmp_path / "log").write_bytes(b"".join(b"line %d\n" % number for number in range(100_000)))
    assert last_lines(tmp_path / "log", 3) == ["line 99997", "line 99998", "line 99999"]
    lines = last_lines(tmp_path / "log", 100_000)
    assert 100 < len(lines) < 10_000
    assert all(line.startswith("line ") for line in lines)


def test_a_missing_log_has_no_last_lines(tmp_path):
    assert last_lines(tmp_path / "log", 5) == []
