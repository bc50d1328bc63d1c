"""Programs that a bare Python is given as text."""

import io
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile

import pytest

from paceline.remote import foreign_python
from paceline.remote.agent import boot
from paceline.remote.foreign_python import library_digest, library_files, packed_library

PROGRAM = """
from __future__ import annotations
import atexit
import os

atexit.register(lambda: os.write(2, b"at the end"))

def add(first, second):
    print('PACELINE-ANSWERS {"sum": "not this one"}')
    return {"sum": first + second}

def nothing():
    return None

def other():
    import lying_here
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def run(words, program, **options):
    return subprocess.run(words, input=program, capture_output=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("installed", [False, True])
def test_answer_of_a_remote_python_program_is_found_among_other_output(source, installed):
    words = foreign_python.words(sys.executable, "add", installed=installed)
    done = run(words, foreign_python.program(source, "add", "it's \u00e4 \\ ", 'a "$HOME"\n'))
    answer = foreign_python.answer_in(b"welcome!\n" + done.stdout + b"bye\n")
    assert answer == {"sum": "it's \u00e4 \\ " + 'a "$HOME"\n'}
    assert done.stderr == b""


def test_remote_python_program_without_an_answer_runs_its_exit_handlers_and_exits_with_0(source):
    done = run(
        foreign_python.words(sys.executable, "nothing"), foreign_python.program(source, "nothing", ends_at_once=False)
    )
    assert (done.returncode, done.stderr, foreign_python.answer_in(done.stdout)) == (0, b"at the end", None)


def test_remote_python_program_does_not_import_modules_from_its_working_directory(source, tmp_path):
    (tmp_path / "lying_here.py").write_text("")
    done = run(
        foreign_python.words(sys.executable, "other", installed=True),
        foreign_python.program(source, "other"),
        cwd=tmp_path,
    )
    assert b"No module named 'lying_here'" in done.stderr


@pytest.mark.parametrize("output", [b"", b"hello\n", b" PACELINE-ANSWERS {}\n"])
def test_answer_is_none_if_the_program_output_has_no_line_with_the_answer_marker(output):
    assert foreign_python.answer_in(output) is None


def test_program_sent_to_stdin_through_a_shell_can_read_the_bytes_that_follow_it(source, tmp_path):
    (tmp_path / "second.py").write_text("def twice(text):\n    return text * 2\n")
    last = "import sys; print(json.dumps(add('\u00e4', twice(sys.stdin.readline()))))"
    (tmp_path / "first.py").write_text("import json\n")
    program = foreign_python.stream_program(source, str(tmp_path / "first.py"), str(tmp_path / "second.py"), last=last)
    done = run(["sh", "-c", shlex.join(foreign_python.bootstrap_words(sys.executable))], program + b"more\n")
    assert done.stderr == b"at the end"
    assert json.loads(done.stdout.splitlines()[-1]) == {"sum": "\u00e4more\nmore\n"}


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "lib" / "paceline"
    (package / "system").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "system" / "files.py").write_text("x = 1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "files.pyc").write_bytes(b"\0")
    return package.parent


def test_packed_library_unpacks_to_the_same_digest(folder, tmp_path):
    assert list(library_files(folder)) == ["paceline/__init__.py", "paceline/system/files.py"]
    data = packed_library(folder)
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == list(library_files(folder))
    boot.unpack(data, str(tmp_path / "there"), library_digest(folder))
    assert boot.digest(str(tmp_path / "there" / "paceline")) == library_digest(folder)


def test_equal_library_files_are_packed_to_equal_bytes(folder, tmp_path):
    first = packed_library(folder)
    foreign_python._packed.cache_clear()
    (folder / "paceline" / "__init__.py").touch()
    assert packed_library(folder) == first


def test_library_digest_is_cached_per_process(folder):
    first = library_digest(folder)
    (folder / "paceline" / "__init__.py").write_text("another version")
    assert library_digest(folder) == first


def test_cached_digest_is_valid_until_a_file_is_replaced(folder, monkeypatch):
    monkeypatch.setattr(boot, "_STEADY_S", -60.0)  # a file counts as unchanged right after it was written
    file = folder / "paceline" / "system" / "files.py"
    first, about = boot.known_digest(str(folder)), file.stat()
    monkeypatch.setattr(boot, "digest", lambda package: "made again")
    assert boot.known_digest(str(folder)) == first

    time.sleep(0.05)  # file times advance only every few milliseconds
    file.write_text("x = 2\n")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert boot.known_digest(str(folder)) == "made again"


def test_digest_of_recently_changed_files_is_not_cached(folder):
    boot.known_digest(str(folder))
    assert [path.name for path in folder.iterdir()] == ["paceline"]


def test_digest_cache_is_not_written_into_the_library_folder(folder, monkeypatch):
    monkeypatch.setattr(boot, "_STEADY_S", -60.0)
    library_digest(folder)
    assert [path.name for path in folder.iterdir()] == ["paceline"]
