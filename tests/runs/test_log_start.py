from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runs import log_start
from paceline.runs.folder import RunFolder
from paceline.runs.log_start import LogStart, last_lines_start, moment_start, tail_offset
from paceline.runs.logs import AttemptLog, LogFollower, LogLine
from paceline.runs.record import Attempt

#: `write` notes the sizes of the logs at the time T0, and then every STEP seconds.
T0, STEP = 1_700_000_000.0, 0.5


def write(folder: RunFolder, attempt: int, pieces: list[tuple[int, bytes]], *, noted: int | None = None) -> None:
    """The logs of an attempt to whose ranks these pieces were written, each noted; from `noted` on without a note."""
    folder.attempt(attempt).mkdir(parents=True, exist_ok=True)
    sizes: dict[int, int] = {}
    with open(folder.log_order(attempt), "a") as order:
        for number, (rank, data) in enumerate(pieces):
            with open(folder.rank_log(attempt, rank), "ab") as file:
                file.write(data)
            sizes[rank] = sizes.get(rank, 0) + len(data)
            if noted is None or number < noted:
                order.write(f"{T0 + STEP * number:.3f} {rank} {sizes[rank]}\n")


def shown(
    folder: RunFolder, attempts: int, ranks: list[int], start: LogStart | None = None
) -> list[tuple[int, int, str]]:
    follower = LogFollower(folder, ranks, start)
    lines = list(follower.new(attempts, is_over=True))
    follower.close()
    return [(line.attempt, line.rank, line.text) for line in lines]


pieces = st.lists(st.tuples(st.integers(0, 2), st.text("ab\n\r", max_size=6).map(str.encode)), max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    attempts=st.lists(pieces, min_size=1, max_size=3), count=st.integers(0, 12), only=st.booleans(), seed=st.integers()
)
def test_last_lines_of_a_run_log_equal_the_end_of_its_whole_log(tmp_path_factory, attempts, count, only, seed):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for number, written in enumerate(attempts, start=1):
        write(folder, number, written, noted=random.Random(seed).choice([None, len(written) // 2, 0]))
    ranks = [1] if only else [0, 1, 2]
    everything = shown(folder, len(attempts), ranks)
    start = last_lines_start(folder, range(1, len(attempts) + 1), ranks, count)
    found = shown(folder, len(attempts), ranks, start)

    assert found == everything[len(everything) - len(found) :]
    # A newline may only end a progress bar, so there may be more lines than requested, but not fewer.
    assert len(found) >= min(count, len(everything))
    assert count > 0 or not found


@settings(max_examples=150, deadline=None)
@given(written=pieces, at=st.integers(0, 31))
def test_lines_before_the_start_time_are_skipped(tmp_path_factory, written, at):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    write(folder, 1, written)
    started = [Attempt(number=1, started_utc="2023-11-14T22:13:20Z")]
    start = moment_start(folder, started, [0, 1, 2], T0 + STEP * at - STEP / 2)

    assert start is not None
    log = AttemptLog(folder, 1, [0, 1, 2], start)
    found = list(log.end())
    log.close()
    # Paceline knows the sizes of the logs at some times. It leaves out the lines that were complete at the last such
    # time before the start.
    before = RunFolder(folder.path.with_name(f"{folder.path.name}_before"))
    write(before, 1, written[:at])
    early = AttemptLog(before, 1, [0, 1, 2])
    whole = len(list(early.new()))
    early.close()
    everything = AttemptLog(folder, 1, [0, 1, 2])
    assert found == list(everything.end())[whole:]
    everything.close()


def test_log_start_after_the_last_timestamp_shows_only_lines_without_a_timestamp(tmp_path):
    folder = RunFolder(tmp_path)
    write(folder, 1, [(0, b"old\n"), (0, b"half"), (0, b" and half\nnew\n")], noted=2)
    start = moment_start(folder, [Attempt(number=1, started_utc="")], [0], T0 + 1000)
    assert shown(folder, 1, [0], start) == [(1, 0, "half and half"), (1, 0, "new")]


def test_attempts_that_ended_before_the_start_time_are_skipped(tmp_path):
    folder = RunFolder(tmp_path)
    ended = ["2023-11-14T22:14:00Z", "2023-11-14T22:15:00Z"]
    attempts = [Attempt(number=k + 1, started_utc="", ended_utc=end) for k, end in enumerate(ended)]
    for attempt in attempts:
        write(folder, attempt.number, [(0, b"attempt %d\n" % attempt.number)], noted=0)
    after_the_first = 1_700_000_000 + 60

    assert shown(folder, 2, [0], moment_start(folder, attempts, [0], 0)) == [(1, 0, "attempt 1"), (2, 0, "attempt 2")]
    assert shown(folder, 2, [0], moment_start(folder, attempts, [0], after_the_first)) == [(2, 0, "attempt 2")]
    assert moment_start(folder, attempts, [0], after_the_first + 3600) is None
    assert moment_start(folder, [], [0], 0) == LogStart()


def test_function_later_returns_the_log_start_of_the_later_attempt_or_the_larger_offset_per_rank():
    one, two = LogStart(1, 500, {0: 5, 1: 9}), LogStart(2, 0, {})
    assert one.later(two) == two.later(one) == two
    assert one.later(LogStart(1, 400, {0: 6})) == LogStart(1, 500, {0: 6, 1: 9})


def test_tail_reads_only_the_end_of_a_large_log(tmp_path, monkeypatch):
    folder, read = RunFolder(tmp_path), []
    # Rank 1 prints only at the beginning, and rank 0 prints all the time.
    write(folder, 1, [(1, b"early\n"), *((0, b"line %d\n" % number * 50) for number in range(40_000))])
    monkeypatch.setattr(log_start, "open", lambda *args: Counting(Path(args[0]).open(args[1]), read), raising=False)  # noqa: SIM115
    start = last_lines_start(folder, [1], [0, 1], 20)

    assert [text for _, _, text in shown(folder, 1, [0, 1], start)][-20:] == ["line 39999"] * 20
    assert start.offsets[1] == 6
    notes = folder.log_order(1).stat().st_size
    assert sum(read) < notes + (notes >> 3) + (4 << 20) < folder.rank_log(1, 0).stat().st_size


class Counting:
    """A file that notes how much is read of it."""

    def __init__(self, file, read):
        self._file, self._read = file, read

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def read(self, size):
        data = self._file.read(size)
        self._read.append(len(data))
        return data


@pytest.mark.parametrize("order", ["", "x\n", "1.0 zero 2\n", "1.0 0 99999\n", "1.0 0 2", "\n\n", "1" * 70_000])
def test_all_last_log_lines_are_shown_even_if_the_line_order_file_is_broken(tmp_path, order):
    folder = RunFolder(tmp_path)
    write(folder, 1, [(0, b"a\nb\n"), (1, b"c\n")], noted=0)
    folder.log_order(1).write_text(order)
    for start in (
        last_lines_start(folder, [1], [0, 1], 9),
        moment_start(folder, [Attempt(number=1, started_utc="")], [0, 1], 0),
    ):
        assert sorted(shown(folder, 1, [0, 1], start)) == [(1, 0, "a"), (1, 0, "b"), (1, 1, "c")]


def test_last_line_of_a_progress_bar_of_many_megabytes_is_its_last_state(tmp_path):
    folder = RunFolder(tmp_path)
    write(folder, 1, [(0, b"first\n" + b"".join(b"\r%d%%" % number for number in range(1_000_000)))])
    start = last_lines_start(folder, [1], [0], 1)
    assert shown(folder, 1, [0], start) == [(1, 0, "999999%")]
    assert start.offsets[0] > 5_000_000


def test_following_a_log_from_its_last_lines_continues_with_new_lines(tmp_path):
    folder = RunFolder(tmp_path)
    write(folder, 1, [(0, b"one\ntwo\n"), (1, b"three\nhal")])
    follower = LogFollower(folder, [0, 1], last_lines_start(folder, [1], [0, 1], 2, unended=False), 2)
    assert list(follower.new(1, is_over=False)) == [LogLine(1, 0, "two"), LogLine(1, 1, "three")]
    write(folder, 1, [(1, b"f\nfour\nfive\n")], noted=0)
    assert [line.text for line in follower.new(1, is_over=False)] == ["half", "four", "five"]
    follower.close()


@pytest.mark.parametrize(
    ("text", "count", "end"),
    [
        (b"", 3, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc", 1, b"c"),
        (b"a\nb\n", 0, b""),
        (b"a\nb", 0, b""),
        (b"a\nb\n", 9, b"a\nb\n"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"a\n" + b"x" * 200_000 + b"\nb\n", 2, b"x" * 200_000 + b"\nb\n"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_tail_offset_returns_the_byte_offset_at_which_the_last_n_lines_begin(tmp_path: Path, text, count, end):
    (tmp_path / "log").write_bytes(text)
    assert text[tail_offset(tmp_path / "log", count) :] == end
    assert tail_offset(tmp_path / "none", count) == 0
