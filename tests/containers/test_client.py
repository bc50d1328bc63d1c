from __future__ import annotations

import os

import pytest

from paceline.containers.client import call, reason
from paceline.errors import LauncherError
from paceline.system.processes import is_alive
from tests.helpers import wait_until, write_program


@pytest.fixture
def script(tmp_path):
    return lambda text: [str(write_program(tmp_path / "client", f"#!/bin/sh\n{text}\n"))]


def test_exit_code_and_lines_of_both_streams_come_back(script):
    said: list[str] = []
    code, lines = call(script("echo out; echo err >&2; printf unfinished; exit 7"), say=said.append)
    assert code == 7
    assert lines == said == ["out", "err", "unfinished"]


def test_whatever_bytes_come_are_text(script):
    code, lines = call(script("printf 'a\\377b\\n'"))
    assert (code, lines) == (0, ["a�b"])


def test_what_it_started_is_gone_when_nobody_hears_it_any_more(script):
    pids: list[int] = []

    def hear(line: str) -> None:
        pids.append(int(line))
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        call(script("sleep 600 & echo $!; wait"), say=hear)
    wait_until(lambda: not is_alive(pids[0]), "the child is gone")


def test_a_client_that_is_not_there_is_named():
    with pytest.raises(LauncherError, match="'/nowhere/podman' could not be started: No such file"):
        call(["/nowhere/podman", "pull"])


def test_it_has_the_environment_that_it_is_given(script):
    _, lines = call(script('echo "$TOKEN"'), environment={**os.environ, "TOKEN": "x"})
    assert lines == ["x"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Trying", "Error: one", "Error: two.", "See 'podman run --help'"], "two"),
        (["docker: Error response from daemon: no such image: x."], "no such image: x"),
        (["Error response from daemon: pull access denied"], "pull access denied"),
        (["FATAL:   While making image: denied"], "While making image: denied"),
        (["something else", ""], "something else"),
        ([], ""),
    ],
)
def test_the_reason_is_the_engines_last_error(lines, expected):
    assert reason(lines) == expected
