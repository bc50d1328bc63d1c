"""Programs that a bare Python is given as text."""

import json
import shlex
import subprocess
import sys

import pytest

from paceline.remote import call

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
def test_the_answer_is_found_among_what_else_is_printed(source, installed):
    words = call.words(sys.executable, "add", installed=installed)
    done = run(words, call.program(source, "add", "it's \u00e4 \\ ", 'a "$HOME"\n'))
    answer = call.answer_in(b"welcome!\n" + done.stdout + b"bye\n")
    assert answer == {"sum": "it's \u00e4 \\ " + 'a "$HOME"\n'}
    assert done.stderr == b""


def test_a_program_may_end_as_its_libraries_want_and_may_have_no_answer(source):
    done = run(call.words(sys.executable, "nothing"), call.program(source, "nothing", ends_at_once=False))
    assert (done.returncode, done.stderr, call.answer_in(done.stdout)) == (0, b"at the end", None)


def test_what_lies_where_a_program_starts_is_not_imported(source, tmp_path):
    (tmp_path / "lying_here.py").write_text("")
    done = run(call.words(sys.executable, "other", installed=True), call.program(source, "other"), cwd=tmp_path)
    assert b"No module named 'lying_here'" in done.stderr


@pytest.mark.parametrize("output", [b"", b"hello\n", b" PACELINE-ANSWERS {}\n"])
def test_no_marked_line_is_no_answer(output):
    assert call.answer_in(output) is None


def test_a_stream_goes_on_behind_its_program_through_any_shell(source, tmp_path):
    (tmp_path / "second.py").write_text("def twice(text):\n    return text * 2\n")
    last = "import sys; print(json.dumps(add('\u00e4', twice(sys.stdin.readline()))))"
    (tmp_path / "first.py").write_text("import json\n")
    program = call.stream_program(source, str(tmp_path / "first.py"), str(tmp_path / "second.py"), last=last)
    done = run(["sh", "-c", shlex.join(call.bootstrap_words(sys.executable))], program + b"more\n")
    assert done.stderr == b"at the end"
    assert json.loads(done.stdout.splitlines()[-1]) == {"sum": "\u00e4more\nmore\n"}
