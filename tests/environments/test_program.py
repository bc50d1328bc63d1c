"""A program of a build: its lines, its end, and the secrets that must not be shown."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from paceline.environments import program
from paceline.errors import EnvironmentBuildError
from tests.helpers import start_python, wait_until


def run(code, **options):
    said = []
    result, lines = program.run([sys.executable, "-c", code], dict(os.environ), said.append, **options)
    return result, lines, said


def test_stdout_and_stderr_of_a_build_program_are_returned_by_line_without_colors():
    code = "import sys; print('\\x1b[31mred\\x1b[0m\\n', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    assert run(code) == (3, ["red", "", "err"], ["red", "err"])


def test_working_directory_of_a_build_program_is_the_file_system_root():
    assert run("import os; print(os.getcwd())")[1] == ["/"]


def test_non_utf8_output_bytes_of_a_build_program_are_replaced():
    assert run("import os; os.write(1, b'a\\xffb\\n')")[1] == ["a\N{REPLACEMENT CHARACTER}b"]


def test_build_program_reads_its_standard_input():
    assert run("import sys; print(sys.stdin.read().upper())", stdin="given")[1] == ["GIVEN"]
    assert run("pass", stdin="x" * 1_000_000)[0] == 0


def test_credentials_in_build_output_are_masked():
    code = "print('https://me:hunter2@host/x https://t0ken@host and s3cret-value'); print('git@host:x')"
    _, lines, said = run(code, secrets=["s3cret-value", ""])
    assert lines == said == ["https://***@host/x https://***@host and ***", "git@host:x"]


def test_missing_build_program_raises_environment_build_error():
    with pytest.raises(EnvironmentBuildError, match="'/nowhere/uv' could not be started: No such file"):
        program.run(["/nowhere/uv"], {}, print)


def test_build_program_is_killed_if_the_output_callback_raises():
    pids = []

    def say(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(
            [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
            dict(os.environ),
            say,
        )
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux: elsewhere nothing ends a killed process's children"
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_build_program_ends_with_its_parent_process(number):
    code = (
        "import os, sys\nfrom paceline.environments import program\n"
        "program.run([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'],"
        " dict(os.environ), lambda line: print(line, flush=True))"
    )
    parent = start_python(code)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(number)
    parent.communicate(timeout=120)

    def is_gone():
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().split()[2] == "Z"
        except FileNotFoundError:
            return True

    wait_until(is_gone, "the child has ended")
