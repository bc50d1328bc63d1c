from __future__ import annotations

import pytest

from paceline.containers import ContainerEngine, start_failure

PODMAN = ContainerEngine(kind="podman", path="/usr/bin/podman", version="5")
DOCKER = ContainerEngine(kind="docker", path="/usr/bin/docker", version="27")
APPTAINER = ContainerEngine(kind="apptainer", path="/usr/bin/apptainer", version="1")


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
def test_an_engine_that_could_not_start_is_told_with_its_reason(engine, code, line, told):
    assert told in str(
        start_failure(engine, "img:1", "python3", code, ["some other line", line, "See 'podman run --help'"])
    )


@pytest.mark.parametrize(("engine", "code"), [(PODMAN, 1), (PODMAN, 137), (DOCKER, 2), (DOCKER, 255), (APPTAINER, 125)])
def test_any_other_exit_code_is_the_scripts(engine, code):
    assert start_failure(engine, "img:1", "python3", code, ["Error: of the script"]) is None


def test_without_a_word_from_the_engine_the_exit_code_is_told():
    assert "podman could not start a container: exit code 125." in str(
        start_failure(PODMAN, "img:1", "python3", 125, [])
    )
