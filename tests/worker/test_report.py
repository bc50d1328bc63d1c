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


def test_worker_reports_its_start(attempt):
    report.started()
    found = read(attempt / "start_5.json")
    assert (found["pid"], found["host"]) == (os.getpid(), os.uname().nodename)
    assert abs(found["time"] - time.time()) < 60


def test_exit_code_is_reported(attempt):
    report.ended(137)
    assert read(attempt / "end_5.json")["exit_code"] == 137


def test_nothing_half_written_is_ever_seen(attempt):
    report.started()
    report.failed(ValueError("x"))
    report.ended(1)
    assert names(attempt) == ["end_5.json", "error_5.json", "start_5.json"]


def test_the_exception_goes_where_torchelastic_s_would(attempt, tmp_path, monkeypatch):
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
def test_exception_is_reported_in_one_line(attempt, error, line):
    report.failed(error)
    assert read(attempt / "error_5.json")["exception"].rstrip() == line


def test_the_line_is_the_exception_s_and_not_a_note_s(attempt):
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
def test_the_exit_code_is_python_s(attempt, error, code):
    report.failed(error)
    assert read(attempt / "error_5.json")["exit_code"] == code


def test_a_folder_that_is_gone_does_not_keep_the_script_from_its_end(attempt, capsys):
    attempt.rmdir()
    report.failed(ValueError())
    assert "could not be written" in capsys.readouterr().err


# --- a full disk


@pytest.mark.parametrize("length", [10, 100_000])
def test_on_a_full_disk_the_exception_is_written_into_the_space_that_was_held(small_disk, monkeypatch, length):
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
