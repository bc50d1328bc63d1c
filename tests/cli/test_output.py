"""Output whose reader closes the pipe ends the command; other closed pipes do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

ANOTHER_PIPE = """
import os, sys
from paceline.cli.output import end_with_the_reader
end_with_the_reader()
read, write = os.pipe()
os.close(read)
try:
    os.write(write, b"x")
except BrokenPipeError:
    print("ü goes on")
    print("and on", file=sys.stderr)
"""

MANY_LINES = """
from paceline.cli.output import end_with_the_reader
end_with_the_reader()
for number in range(100_000):
    print("line", number)
"""


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_broken_pipe_other_than_stdout_does_not_end_the_program(unbuffered):
    words = [sys.executable, *unbuffered, "-c", ANOTHER_PIPE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=True, env=_utf8())
    assert (done.stdout, done.stderr) == ("ü goes on\n", "and on\n")


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_program_ends_by_sigpipe_without_an_error_message_if_its_stdout_is_closed(unbuffered):
    with subprocess.Popen(
        [sys.executable, *unbuffered, "-c", MANY_LINES],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_utf8(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == -signal.SIGPIPE


def _utf8() -> dict[str, str]:
    return {**os.environ, "PYTHONUTF8": "1"}
