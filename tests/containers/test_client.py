from __future__ import annotations

import os

import pytest

from paceline.containers import ContainerEngine, start_failure
from paceline.containers.client import call, reason
from paceline.errors import LauncherError
from paceline.system.processes import is_alive
from tests.helpers import wait_until, write_program

PODMAN = ContainerEngine(kind="podman", path="/usr/bin/podman", version="5")
DOCKER = ContainerEngine(kind="docker", path="/usr/bin/docker", version="27")
APPTAINER = ContainerEngine(kind="apptainer", path="/usr/bin/apptainer", version="1")


@pytest.fixture
def script(tmp_path):
    return lambda text: [str(write_program(tmp_path / "client", f"#!/bin/sh\n{text}\n"))]


def test_client_call_returns_exit_code_and_output_lines(script):
    said: list[str] = []
    code, lines = call(script("echo out; echo err >&2; printf unfinished; exit 7"), say=said.append)
    assert code == 7
    assert lines == said == ["out", "err", "unfinished"]


def test_undecodable_output_bytes_of_a_container_client_are_replaced(script):
    code, lines = call(script("printf 'a\\377b\\n'"))
    assert (code, lines) == (0, ["a�b"])


def test_child_processes_of_the_container_client_are_killed_if_the_output_callback_raises(script):
    pids: list[int] = []

    def hear(line: str) -> None:
        pids.append(int(line))
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        call(script("sleep 600 & echo $!; wait"), say=hear)
    wait_until(lambda: not is_alive(pids[0]), "the child is gone")


def test_error_names_the_container_program_if_it_does_not_exist():
    with pytest.raises(LauncherError, match="'/nowhere/podman' could not be started: No such file"):
        call(["/nowhere/podman", "pull"])


def test_container_client_runs_with_the_given_environment_variables(script):
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
def test_failure_reason_is_the_last_error_line_of_the_container_engine(lines, expected):
    assert reason(lines) == expected


@pytest.mark.parametrize(
    ("engine", "code", "line", "told"),
    [
        (
            PODMAN,
            127,
            'Error: runc: runc create failed: unable to start container process: exec: "python3": executable file not '
            "found in $PATH: OCI runtime attempted to invoke a command that was not found",
            "custom_docker_image='img:1' has no program 'python3' (podman: runc: runc create failed",
        ),
        (
            PODMAN,
            126,
            "Error: crun: open executable: Permission denied: OCI permission denied",
            "custom_docker_image='img:1': podman can't run its 'python3': crun: open executable: Permission denied",
        ),
        (
            PODMAN,
            125,
            "Error: statfs /data/x: no such file or directory",
            "custom_docker_image='img:1': podman could not start a container: statfs /data/x: no such file or directory.",
        ),
        (
            PODMAN,
            125,
            "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all",
            "install NVIDIA's container toolkit",
        ),
        (
            DOCKER,
            125,
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            "install NVIDIA's container toolkit",
        ),
        (
            DOCKER,
            127,
            'docker: Error response from daemon: failed to create task for container: exec: "python3": executable file not '
            "found in $PATH: unknown.",
            "has no program 'python3' (docker: failed to create task for container: exec",
        ),
        (
            APPTAINER,
            255,
            "FATAL:   stat /usr/bin/python3: no such file or directory",
            "apptainer could not start a container",
        ),
    ],
)
def test_start_failure_text_has_the_reason_that_the_container_engine_printed(engine, code, line, told):
    assert told in str(
        start_failure(engine, "img:1", "python3", code, ["some other line", line, "See 'podman run --help'"])
    )


@pytest.mark.parametrize(("engine", "code"), [(PODMAN, 1), (PODMAN, 137), (DOCKER, 2), (DOCKER, 255), (APPTAINER, 125)])
def test_exit_code_not_reserved_by_the_container_engine_is_no_start_failure(engine, code):
    assert start_failure(engine, "img:1", "python3", code, ["Error: of the script"]) is None


def test_start_failure_without_output_has_the_exit_code():
    assert "podman could not start a container: exit code 125." in str(
        start_failure(PODMAN, "img:1", "python3", 125, [])
    )
