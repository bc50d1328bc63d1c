"""The board of a rank's collectives."""

from __future__ import annotations

import os

import pytest

from paceline.collectives import recorder as own
from paceline.system import collective_state
from paceline.system.collective_state import RankBoard, entry_text, ranks_of, ranks_text


def test_running_collective_is_read_from_the_state_file_of_its_rank(tmp_path):
    path = str(tmp_path / "board_0")
    written = RankBoard(path)
    first = written.begin(entry_text("torch 0", "all_reduce", "", "[4, 3] float", 48, "0-3"), 512)
    second = written.begin(entry_text("process set 0", "allreduce", "grad.7é", "", 0, ""), 0)
    read = collective_state.read(path)
    assert [(one.kind, one.number, one.shape, one.bytes, one.ranks, one.name) for one in read] == [
        ("all_reduce", 512, "[4, 3] float", 48, "0-3", ""),
        ("allreduce", 0, "", 0, "", "grad.7é"),
    ]
    written.end(first)
    assert [one.name for one in collective_state.read(path)] == ["grad.7é"]
    written.end(second)
    assert collective_state.read(path) == []


def test_collectives_beyond_the_capacity_of_the_state_file_are_not_recorded(tmp_path):
    path = str(tmp_path / "board")
    written = RankBoard(path)
    places = [written.begin(entry_text("c", "k", str(number), "", 0, ""), 0) for number in range(300)]
    assert places[-1] == -1
    assert len(collective_state.read(path)) == 256
    for place in places:
        written.end(place)
    assert collective_state.read(path) == []


def test_long_collective_name_is_truncated_without_losing_other_fields(tmp_path):
    path = str(tmp_path / "board")
    RankBoard(path).begin(entry_text("process set 0", "allreduce", "n" * 1000, "[1] float32", 4, "0-7"), 0)
    (found,) = collective_state.read(path)
    assert (found.bytes, found.ranks, set(found.name)) == (4, "0-7", {"n"})


def test_missing_or_invalid_collective_state_file_reads_as_empty(tmp_path):
    assert collective_state.read(str(tmp_path / "none")) == []
    (tmp_path / "torn").write_bytes(b"\1" * 600)
    assert collective_state.read(str(tmp_path / "torn")) == []


@pytest.mark.parametrize(("ranks", "text"), [([0, 1, 2, 3], "0-3"), ([5], "5"), ([0, 2, 3], "0,2-3"), ([], "")])
def test_list_of_ranks_is_formatted_as_ranges_and_parsed_back(ranks, text):
    assert ranks_text(ranks) == text
    assert ranks_of(text) == ranks


def test_forked_child_does_not_write_to_the_collective_state_file_of_its_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "_board", None)
    monkeypatch.setattr(own, "_is_made", False)
    own.board({"PACELINE_WATCH_DIR": str(tmp_path), "PACELINE_RANK": "0"})
    text = entry_text("c", "k", "n", "", 0, "")
    with own.under_way(text, 3):
        assert [one.number for one in collective_state.read(str(tmp_path / "board_0"))] == [3]
        if (child := os.fork()) == 0:
            own.begin(text, 4)
            os._exit(0)
        os.waitpid(child, 0)
        assert [one.number for one in collective_state.read(str(tmp_path / "board_0"))] == [3]
    assert collective_state.read(str(tmp_path / "board_0")) == []
