"""A file while it is fetched: its lock, its stored state, and what a kill leaves."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data.transfer import partial as module
from paceline.data.transfer.partial import claim
from paceline.system import locks


@pytest.fixture
def part(tmp_path):
    return tmp_path / "x.part"


def test_partial_download_can_be_claimed_by_only_one_process(part):
    mine = claim(part, 10, wait=False)
    assert claim(part, 10, wait=False) is None
    assert locks.is_held(part)
    mine.close()
    assert not locks.is_held(part)
    again = claim(part, 10, wait=False)
    assert again is not None
    again.close()


def test_partial_file_resumes_at_its_length(part):
    mine = claim(part, 10, wait=False)
    mine.write(b"abcd", 0)
    mine.close()  # closes the file without finishing it, as a kill would
    again = claim(part, 10, wait=False)
    assert again.missing() == [(4, 10)]
    assert again.done_bytes == 4
    again.close()


def test_partial_file_longer_than_the_whole_file_is_discarded(part):
    part.write_bytes(b"too long by far")
    mine = claim(part, 10, wait=False)
    assert mine.missing() == [(0, 10)]
    assert mine.held_bytes() == 0
    mine.close()


def test_only_recorded_byte_ranges_are_skipped_when_a_download_resumes(part, monkeypatch):
    monkeypatch.setattr(module, "SINGLE_BYTES", 10)
    mine = claim(part, 100, wait=False)
    mine.write(b"x" * 20, 40)
    mine.mark(40, 60)
    mine.write(b"y" * 20, 80)
    mine.close()
    again = claim(part, 100, wait=False)
    assert again.missing() == [(0, 40), (60, 100)]
    again.close()


@pytest.mark.parametrize("torn", [b"0 100", b"0 1000\n", b"-5 100\n", b"60 40\n", b"a b\n", b"\xff\n"])
def test_truncated_or_invalid_line_of_downloaded_byte_ranges_is_ignored(part, monkeypatch, torn):
    monkeypatch.setattr(module, "SINGLE_BYTES", 10)
    part.write_bytes(b"z" * 50)
    part.with_suffix(".ranges").write_bytes(b"0 10\n" + torn)
    mine = claim(part, 100, wait=False)
    assert mine.missing() == [(10, 100)]
    mine.close()


def test_recorded_byte_ranges_of_a_missing_partial_download_are_ignored(part, monkeypatch):
    monkeypatch.setattr(module, "SINGLE_BYTES", 10)
    part.with_suffix(".ranges").write_bytes(b"0 100\n")
    mine = claim(part, 100, wait=False)
    assert mine.missing() == [(0, 100)]
    mine.write(b"x", 99)
    mine.close()
    again = claim(part, 100, wait=False)
    assert again.missing() == [(0, 100)]
    again.close()


def test_finished_download_is_renamed_and_its_partial_files_are_removed(part, monkeypatch):
    monkeypatch.setattr(module, "SINGLE_BYTES", 3)
    mine = claim(part, 4, wait=False)
    mine.write(b"abcd", 0)
    mine.mark(0, 4)
    mine.finish(part.with_name("whole"), mode=0o444, mtime_ns=10**18)
    [whole] = part.parent.iterdir()
    assert (whole.name, whole.read_bytes(), whole.stat().st_mtime_ns) == ("whole", b"abcd", 10**18)


def test_process_that_waited_for_a_download_does_not_claim_the_finished_file(part):
    """The waiting process has the finished file open; had it taken the lock for its own, it would truncate it."""
    import threading

    mine = claim(part, 4, wait=False)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(claim(part, 4, wait=True)))
    waiting.start()
    mine.write(b"abcd", 0)
    mine.finish(part.with_name("whole"), mode=0o444, mtime_ns=None)
    waiting.join()
    [found] = got
    if found is not None:  # the thread came late, so it created a partial file of its own
        found.discard()
    assert part.with_name("whole").read_bytes() == b"abcd"


def test_file_finished_between_open_and_lock_is_not_written_to(part, monkeypatch):
    other = claim(part, 4, wait=False)
    other.write(b"abcd", 0)
    lock = module.fcntl.flock

    def late(fd, how) -> None:
        monkeypatch.setattr(module.fcntl, "flock", lock)
        other.finish(part.with_name("whole"), mode=0o444, mtime_ns=None)
        lock(fd, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    mine = claim(part, 4, wait=False)
    mine.write(b"????", 0)
    mine.close()
    assert part.with_name("whole").read_bytes() == b"abcd"


def test_symlink_in_place_of_a_partial_file_is_not_followed(part, tmp_path):
    (tmp_path / "precious").write_text("stays")
    part.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        claim(part, 4, wait=False)
    assert (tmp_path / "precious").read_text() == "stays"
