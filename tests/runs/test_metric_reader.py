"""Incremental reading of metric logs."""

from __future__ import annotations

import os

import pytest

from paceline.runs import metric_reader
from paceline.runs.metric_reader import FolderListing, LogTail, last_entries, parsed_lines


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_tail_returns_each_complete_line_once(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    append(path, "one\ntwo\nthr")
    tail = LogTail(path)
    assert [*tail.chunks()] == [b"one\ntwo\n"]
    assert [*tail.chunks()] == []
    append(path, "ee\n")
    assert [*tail.chunks()] == [b"three\n"]


@pytest.mark.parametrize("chunk_bytes", [1, 3, 8, 100])
def test_tail_keeps_lines_longer_than_a_chunk_whole(tmp_path, chunk_bytes):
    path = tmp_path / "rank_0.jsonl"
    append(path, "a long line\nb\n\nanother long line\nunfinished")
    chunks = [*LogTail(path).chunks(chunk_bytes)]
    assert all(chunk.endswith(b"\n") for chunk in chunks)
    assert b"".join(chunks) == b"a long line\nb\n\nanother long line\n"


def test_parsed_lines_skip_a_line_that_was_cut_short(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    append(path, '{"a": 1}\n{"b"\n\n{"c": 3}\n{"d":')
    assert [*parsed_lines(path)] == [{"a": 1}, {"c": 3}]


def test_last_metric_entries_skip_a_line_that_is_cut_at_the_start_of_the_read_bytes(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    append(path, "".join(f'{{"name": "loss", "value": {number}}}\n' for number in range(10)) + '{"attempt": 1}\n')
    assert [entry["value"] for entry in last_entries(path, 80)] == [8, 9]
    assert last_entries(tmp_path / "missing", 80) == []


def test_folder_is_listed_again_after_a_change_or_a_second(tmp_path, monkeypatch):
    clock = 100.0
    monkeypatch.setattr(metric_reader.time, "monotonic", lambda: clock)
    listing = FolderListing(tmp_path)
    assert [listing.is_due(), listing.is_due()] == [True, False]
    os.utime(tmp_path, (1, 1))
    assert [listing.is_due(), listing.is_due()] == [True, False]
    clock += 1
    assert [listing.is_due(), listing.is_due()] == [True, False]
    assert not FolderListing(tmp_path / "missing").is_due()
