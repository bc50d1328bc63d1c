from __future__ import annotations

import os
import re
import threading

import pytest

from paceline.compat.horovod.runner.output import Output
from paceline.errors import UserError
from tests.helpers import fill_disk


def made(size, **options):
    """The output of so many ranks."""
    output = Output(**options)
    output.grow(size)
    return output


def shown(capfd, *pieces, **options):
    """Return standard output after these pieces (rank, stream, bytes) and the ranks' ends."""
    output = made(2, **options)
    for rank, stream, data in pieces:
        output.write(rank, stream, data)
    for rank in range(2):
        output.finish(rank)
    output.close()
    return capfd.readouterr()


def test_each_output_line_begins_with_its_rank_and_stream(capfd):
    found = shown(capfd, (0, "stdout", b"a\nb\n"), (1, "stderr", b"c\n"))
    assert found.out == "[0]<stdout>:a\n[0]<stdout>:b\n"
    assert found.err == "[1]<stderr>:c\n"


def test_line_written_in_pieces_is_printed_once(capfd):
    found = shown(capfd, (0, "stdout", b"a"), (1, "stdout", b"x\n"), (0, "stdout", b"b"), (0, "stdout", b"c\n"))
    assert found.out == "[1]<stdout>:x\n[0]<stdout>:abc\n"


def test_last_line_without_a_newline_is_printed(capfd):
    assert shown(capfd, (0, "stdout", b"a\nb")).out == "[0]<stdout>:a\n[0]<stdout>:b\n"


def test_each_state_of_a_progress_bar_is_printed_as_a_line(capfd):
    assert shown(capfd, (0, "stdout", b"1%\r2%\r"), (0, "stdout", b"3%\n")).out == "".join(
        f"[0]<stdout>:{state}\n" for state in ("1%", "2%", "3%")
    )


def test_crlf_split_over_two_writes_ends_one_line(capfd):
    assert shown(capfd, (0, "stdout", b"a\r\nb\r"), (0, "stdout", b"\nc")).out == "".join(
        f"[0]<stdout>:{line}\n" for line in "abc"
    )


def test_non_utf8_bytes_pass_unchanged(capfdbinary):
    output = made(1)
    output.write(0, "stdout", b"\xff\x00\n")
    assert capfdbinary.readouterr().out == b"[0]<stdout>:\xff\x00\n"


def test_timestamp_option_prints_the_time_before_each_line(capfd):
    found = shown(capfd, (0, "stdout", b"a\n"), timestamps=True)
    assert re.fullmatch(r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:a\n", found.out)


def test_output_of_ranks_is_written_to_the_replaced_sys_stdout_of_a_notebook(capsys):
    output = made(1, to_streams=True)
    output.write(0, "stdout", "grün\n".encode() + b"\xff\n")
    assert capsys.readouterr().out == "[0]<stdout>:grün\n[0]<stdout>:\ufffd\n"


def test_output_files_hold_the_raw_bytes(tmp_path, capfd):
    shown(capfd, (0, "stdout", b"a\r\nb"), (1, "stderr", b"c\n"), folder=str(tmp_path / "out put"))
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.glob("*/*/*")}
    assert found == {
        "out put/rank.0/stdout": b"a\r\nb",
        "out put/rank.0/stderr": b"",
        "out put/rank.1/stdout": b"",
        "out put/rank.1/stderr": b"c\n",
    }


def test_folders_of_ranks_sort_by_rank(tmp_path):
    made(11, folder=str(tmp_path)).close()
    assert sorted(os.listdir(tmp_path)) == [f"rank.{rank:02}" for rank in range(11)]


def test_output_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output-filename '.*file' can't be written"):
        made(1, folder=str(tmp_path / "file"))


def test_full_disk_stops_the_output_files_but_not_the_printed_output(small_disk, capfd):
    output = made(1, folder=str(small_disk / "out"))
    fill_disk(small_disk)
    for _ in range(2):
        output.write(0, "stdout", b"a\n" * 5000)
    output.close()
    found = capfd.readouterr()
    assert found.out == "[0]<stdout>:a\n" * 10000
    assert found.err == "horovodrun: rank.0/stdout of --output-filename gets no more output: No space left on device.\n"


def test_very_long_line_is_printed_in_pieces(capfd):
    output = made(1)
    for _ in range(40):
        output.write(0, "stdout", b"x" * (1 << 16))
    assert capfd.readouterr().out == "[0]<stdout>:" + "x" * (17 << 16) + "\n[0]<stdout>:" + "x" * (17 << 16) + "\n"


def test_last_output_lines_are_kept_for_the_error_message():
    output = made(1)
    output.write(0, "stdout", b"".join(b"%d\n" % number for number in range(30)))
    assert output.last_lines(0) == tuple(str(number) for number in range(10, 30))


def test_slow_reader_of_a_non_blocking_output_loses_no_lines():
    """Regression: ssh and node make the terminal non-blocking for all programs that share it. When its buffer was full,
    horovodrun ended with an error."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    kept = os.dup(1)
    os.dup2(writable, 1)
    os.close(writable)
    read: list[bytes] = []

    def take():
        while piece := os.read(readable, 4096):
            read.append(piece)

    reader = threading.Timer(0.2, take)  # after 0.2 s the pipe is full
    reader.start()
    try:
        output = made(1)
        output.write(0, "stdout", b"x" * 500_000 + b"\n")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        reader.join()
        os.close(readable)
    assert b"".join(read) == b"[0]<stdout>:" + b"x" * 500_000 + b"\n"
