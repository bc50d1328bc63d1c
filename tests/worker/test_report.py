from __future__ import annotations

import json
import os
import time

import pytest

from paceline.worker import report
from tests.helpers import fill_disk


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """The folder of the attempt whose worker this process is."""
    path = tmp_path / "attempts/3"
    path.mkdir(parents=True)
    for name, value in (("PACELINE_RUN_DIR", str(tmp_path)), ("PACELINE_ATTEMPT", "3"), ("PACELINE_RANK", "5")):
        monkeypatch.setenv(name, value)
    return path


def read(path):
    return json.loads(path.read_text())


def names(attempt):
    """The files that are there, but for those that hold the space of others."""
    return sorted(name for name in os.listdir(attempt) if not name.endswith(report.HELD))


def test_start_report_of_a_worker_has_its_pid_host_and_time(attempt):
    report.started()
    found = read(attempt / "start_5.json")
    assert (found["pid"], found["host"]) == (os.getpid(), os.uname().nodename)
    assert abs(found["time"] - time.time()) < 60


def test_exit_code_of_a_worker_is_written_to_its_end_report(attempt):
    report.ended(137)
    assert read(attempt / "end_5.json")["exit_code"] == 137


def test_writing_worker_reports_leaves_no_temporary_files(attempt):
    report.started()
    report.failed(ValueError("x"))
    report.ended(1)
    assert names(attempt) == ["end_5.json", "error_5.json", "start_5.json"]


def test_exception_is_written_to_torchelastic_error_file(attempt, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "mine.json"))
    report.failed(ValueError("bad batch"))
    assert read(tmp_path / "mine.json")["exception"] == "ValueError: bad batch"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (ValueError(), "ValueError"),
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("\nindented"), "ValueError:"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("größe"), "ValueError: größe"),
    ],
    ids=ascii,
)
def test_exception_of_a_worker_is_reported_by_its_type_and_first_line(attempt, error, line):
    report.failed(error)
    assert read(attempt / "error_5.json")["exception"].rstrip() == line


def test_reported_exception_line_excludes_its_notes(attempt):
    error = ValueError("bad batch")
    if not hasattr(error, "add_note"):
        pytest.skip("needs Python 3.11")
    error.add_note("while reading data.csv")
    report.failed(error)
    found = read(attempt / "error_5.json")
    assert found["exception"] == "ValueError: bad batch"
    assert "while reading data.csv" in found["message"]["extraInfo"]["py_callstack"]


def test_exception_with_a_broken_str_is_reported(attempt):
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError

    report.failed(OddError())
    assert "OddError" in read(attempt / "error_5.json")["exception"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit("no data"), 1),
    ],
)
def test_reported_exit_code_equals_the_exit_code_of_plain_python(attempt, error, code):
    report.failed(error)
    assert read(attempt / "error_5.json")["exit_code"] == code


def test_missing_attempt_folder_does_not_block_the_end_of_the_script(attempt, capsys):
    attempt.rmdir()
    report.failed(ValueError())
    assert "could not be written" in capsys.readouterr().err


# --- A full disk


@pytest.mark.parametrize("length", [10, 100_000])
def test_exception_is_written_into_reserved_space_on_a_full_disk(small_disk, monkeypatch, length):
    attempt = small_disk / "attempts/3"
    attempt.mkdir(parents=True)
    for name, value in (("PACELINE_RUN_DIR", str(small_disk)), ("PACELINE_ATTEMPT", "3"), ("PACELINE_RANK", "5")):
        monkeypatch.setenv(name, value)
    report.started()
    fill_disk(small_disk)
    report.failed(OSError(28, "No space left on device " + "x" * length))
    found = read(attempt / "error_5.json")
    assert found["exception"].startswith("OSError: [Errno 28] No space left on device xxx")
    assert (found["type"], found["exit_code"]) == ("OSError", 1)


def test_disk_space_for_the_error_report_is_reserved_at_start(attempt):
    report.started()
    (held,) = (path for path in attempt.iterdir() if path.name.endswith(report.HELD))
    assert held.stat().st_size == 4096
