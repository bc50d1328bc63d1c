from __future__ import annotations

import pytest

from paceline.containers import ContainerEngine, find_engine
from paceline.containers.engine import is_rootless
from paceline.errors import EngineError, LauncherError
from tests.containers import fakes


@pytest.fixture
def bin_dir(tmp_path):
    path = tmp_path / "bin"
    path.mkdir()
    return path


def find(bin_dir, **variables):
    return find_engine({"PATH": f"{bin_dir}:/nowhere", **variables})


def test_podman_is_preferred_to_docker_and_docker_to_apptainer(bin_dir):
    fakes.program(bin_dir, "apptainer", fakes.APPTAINER)
    assert find(bin_dir).kind == "apptainer"
    fakes.program(bin_dir, "docker", fakes.DOCKER)
    assert find(bin_dir).kind == "docker"
    podman = fakes.program(bin_dir, "podman", fakes.PODMAN)
    assert find(bin_dir) == ContainerEngine(kind="podman", path=str(podman), version="4.3.1")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("podman", fakes.ROOTLESS_PODMAN, ("podman", "4.3.1", True)),
        ("docker", fakes.ROOTLESS_DOCKER, ("docker", "20.10.24", True)),
        ("docker", fakes.DOCKER, ("docker", "20.10.24", False)),
        ("singularity", fakes.SINGULARITY, ("singularity", "4.1.0-1.el9", True)),
        # The package podman-docker installs podman under the name docker.
        ("docker", fakes.PODMAN, ("podman", "4.3.1", False)),
    ],
)
def test_kind_version_and_rootless_mode_of_a_container_engine_are_parsed_from_its_output(bin_dir, name, text, expected):
    fakes.program(bin_dir, name, text)
    found = find(bin_dir)
    assert (found.kind, found.version, found.is_rootless) == expected


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("docker", fakes.NO_DAEMON, r"docker has no daemon that answers it: Cannot connect to the Docker daemon"),
        ("docker", fakes.OLD_NO_DAEMON, r"docker has no daemon that answers it"),
        ("docker", fakes.NO_ENGINE, r"docker is not a known container engine \(Docker is not installed"),
        ("podman", fakes.BROKEN_PODMAN, r"podman does not work: Error: runtime 'crun' is not there"),
        ("podman", fakes.REMOTE_PODMAN, r"podman serves another machine"),
        ("podman", "exit 3", r"podman is not a known container engine \(exit code 3\)"),
    ],
)
def test_container_engine_that_does_not_work_is_skipped_and_named_if_no_other_is_found(bin_dir, name, text, reason):
    fakes.program(bin_dir, name, text)
    with pytest.raises(LauncherError, match=reason):
        find(bin_dir)
    fakes.program(bin_dir, "apptainer", fakes.APPTAINER)
    assert find(bin_dir).kind == "apptainer"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (fakes.BROKEN_PODMAN, r"podman does not work: Error: runtime 'crun' is not there"),
        (
            fakes.PODMAN.replace("ps) ;;", "ps) exit 125;;"),
            r"podman does not work: `podman ps` ended with exit code 125",
        ),
        (fakes.REMOTE_PODMAN, r"podman serves another machine"),
    ],
)
def test_find_engine_with_to_start_false_asks_podman_only_for_its_version(bin_dir, text, reason):
    fakes.program(bin_dir, "podman", fakes.ROOTLESS_PODMAN.replace("info)", "info) touch $0.asked;"))
    found = find_engine({"PATH": f"{bin_dir}:/bin"}, to_start=False)
    assert (found.kind, found.version, found.is_rootless) == ("podman", "4.3.1", None)
    assert not (bin_dir / "podman.asked").exists()
    assert is_rootless(found)
    assert (bin_dir / "podman.asked").exists()

    fakes.program(bin_dir, "podman", text)
    with pytest.raises(LauncherError, match=reason):
        find_engine({"PATH": f"{bin_dir}:/nowhere"}, to_start=False)


def test_error_without_any_container_engine_names_the_candidates_and_the_package_to_install(bin_dir):
    with pytest.raises(LauncherError) as caught:
        find(bin_dir)
    told = str(caught.value)
    assert "there is no podman on PATH; there is no docker on PATH; there is no apptainer on PATH" in told
    assert "apt-get install podman" in told
    assert "PACELINE_CONTAINER_ENGINE" in told


def test_engine_timeout_raises_engine_error(bin_dir, monkeypatch):
    monkeypatch.setattr("paceline.containers.engine._ANSWER_S", 0.1)
    path = fakes.program(bin_dir, "podman", "exec /bin/sleep 600")
    with pytest.raises(
        EngineError, match=rf"`{path} --version` gave no answer in 0\.1 s; there is no docker .*try again"
    ):
        find(bin_dir)
    with pytest.raises(EngineError, match=f"`{path} --version` gave no answer"):
        find(bin_dir, PACELINE_CONTAINER_ENGINE="podman")


def test_container_engine_variable_selects_the_engine_by_name_or_path(bin_dir, tmp_path):
    fakes.program(bin_dir, "podman", fakes.PODMAN)
    elsewhere = fakes.program(tmp_path, "my docker", fakes.DOCKER)
    assert find(bin_dir, PACELINE_CONTAINER_ENGINE=str(elsewhere)).path == str(elsewhere)
    fakes.program(bin_dir, "apptainer", fakes.APPTAINER)
    assert find(bin_dir, PACELINE_CONTAINER_ENGINE="apptainer").kind == "apptainer"


def test_container_engine_named_by_the_variable_is_refused_if_it_does_not_answer(bin_dir):
    fakes.program(bin_dir, "podman", fakes.PODMAN)
    docker = fakes.program(bin_dir, "docker", fakes.NO_DAEMON)
    with pytest.raises(LauncherError, match=f"PACELINE_CONTAINER_ENGINE='docker', but {docker} has no daemon"):
        find(bin_dir, PACELINE_CONTAINER_ENGINE="docker")
    with pytest.raises(LauncherError, match="but /nowhere/podman can't be run"):
        find(bin_dir, PACELINE_CONTAINER_ENGINE="/nowhere/podman")
    with pytest.raises(LauncherError, match="but there is no nerdctl on PATH"):
        find(bin_dir, PACELINE_CONTAINER_ENGINE="nerdctl")


def test_container_engine_is_equal_after_conversion_to_json_and_back():
    engine = ContainerEngine(kind="podman", path="/usr/bin/podman", version="4.3.1", is_rootless=True)
    assert ContainerEngine.from_json(engine.to_json()) == engine
    assert str(engine) == "podman 4.3.1 (rootless)"
