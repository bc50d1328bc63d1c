"""Logs that are kept within a limit while a process writes them: what stays, what readers see, how much disk they take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.system import gaps

LIMIT = gaps.LEAST_LIMIT


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %07d\n" % number for number in range(first, last))


def append(log: Path, data: bytes) -> None:
    """Write as a worker does, which keeps its log open: at the end, wherever that is."""
    with open(log, "ab", buffering=0) as file:
        file.write(data)


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def log(tmp_path: Path) -> Path:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs fallocate(2)")
    path = tmp_path / "rank_3.log"
    path.touch()
    return path


def test_log_within_its_limit_is_not_truncated(log):
    append(log, lines(0, 100))
    gaps.Keeper(str(log), LIMIT).look()
    assert gaps.read(str(log)) is None
    assert b"".join(gaps.pieces(str(log))) == lines(0, 100)


@pytest.mark.promise("long-log-first-last-part")
def test_log_over_its_limit_keeps_its_first_and_last_lines(log):
    # Regression: a worker that printed without end filled the disk, and every run on this disk failed.
    keeper, written = gaps.Keeper(str(log), LIMIT), 0
    for _ in range(200):
        append(log, lines(written, written + 1000))
        written += 1000
        keeper.look()
        assert disk_bytes(log) < LIMIT + 3 * 4096 + len(lines(0, 1000))
    found = b"".join(gaps.pieces(str(log)))
    kept = found.splitlines()
    (mark,) = [line for line in kept if b"left out" in line]
    assert b"limit of 65,536 bytes (log_limit)" in mark
    at = kept.index(mark)
    assert kept[:at] == lines(0, at).splitlines()
    rest = kept[at + 1 :]
    assert rest == lines(written - len(rest), written).splitlines(), "whole lines, up to the last"
    assert LIMIT // 2 - 8192 < len(found) <= LIMIT + len(lines(0, 1000))
    gap = gaps.read(str(log))
    assert gap is not None
    assert len(found) - len(mark) - 1 + gap.end - gap.begin == len(lines(0, written))


@pytest.mark.promise("long-log-first-last-part")
def test_closing_a_truncated_log_removes_its_gap_and_leaves_its_lines_unchanged(log):
    keeper = gaps.Keeper(str(log), LIMIT)
    append(log, lines(0, 20_000))
    keeper.look()
    before = b"".join(gaps.pieces(str(log)))
    with open(log, "rb") as opened_before:
        assert gaps.close(str(log)) is not None
        assert log.read_bytes() == before == b"".join(gaps.pieces(str(log)))
        assert gaps.close(str(log)) is None, "once is enough"
        assert len(opened_before.read()) == len(lines(0, 20_000)), "who has it open goes on in the long one"
    assert sorted(path.name for path in log.parent.iterdir()) == ["gap_3.json", "rank_3.log"]


def test_reader_of_a_log_that_is_truncated_during_reading_still_gets_its_last_line(log):
    append(log, lines(0, 200_000))
    reader = gaps.pieces(str(log))
    first = next(reader)
    assert first.startswith(lines(0, 2))
    gaps.Keeper(str(log), LIMIT).look()
    rest = b"".join(reader)
    assert b"\0" not in rest
    assert rest.endswith(lines(199_999, 200_000))


def test_log_over_its_limit_stays_whole_if_the_file_system_does_not_support_holes(log, monkeypatch):
    def refuse(fd, gap):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(gaps, "_punch", refuse)
    append(log, lines(0, 20_000))
    keeper = gaps.Keeper(str(log), LIMIT)
    keeper.look()
    assert keeper.trouble == "Operation not supported"
    assert b"".join(gaps.pieces(str(log))) == lines(0, 20_000)
    assert os.listdir(log.parent) == ["rank_3.log"]


def test_byte_offsets_of_the_original_log_map_to_offsets_of_the_truncated_log():
    gap = gaps.Gap(100, 1000, LIMIT)
    mark = len(gap.mark())
    assert [gap.place(offset) for offset in (0, 100, 500, 1000, 1010)] == [0, 100, 100 + mark, 100 + mark, 110 + mark]
