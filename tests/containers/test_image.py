from __future__ import annotations

import json

import pytest

from paceline.containers import ContainerEngine, ImagePython, check_image, check_image_name, check_shm_size, probe
from paceline.containers.image import full_name
from paceline.errors import LauncherError
from tests.containers import fakes

HAS_IT = 'case "$1" in image) echo "id=abc123";; *) exit 9;; esac'
PULLS_IT = """\
case "$1" in
  image) test -e "$0.pulled" && echo "id=abc123" || { echo "Error: no such image" >&2; exit 125; };;
  pull) echo "Copying blob"; printf '10%%\\r20%%\\r'; echo "$2" > "$0.pulled";;
esac
"""
REFUSES = """\
case "$1" in
  pull) echo "Trying to pull"; echo "Error: initializing source: reading manifest: unauthorized" >&2; exit 125;;
  *) exit 125;;
esac
"""


def engine(tmp_path, text, kind="podman"):
    return ContainerEngine(kind=kind, path=str(fakes.program(tmp_path, kind, text)), version="5")


def test_existing_image_is_not_pulled(tmp_path):
    said: list[str] = []
    assert check_image(engine(tmp_path, HAS_IT), "img:1", said.append) == "abc123"
    assert said == []


def test_missing_image_is_pulled_and_the_pull_output_is_shown(tmp_path):
    said: list[str] = []
    assert check_image(engine(tmp_path, PULLS_IT), "pytorch/pytorch:2", said.append) == "abc123"
    assert said == ["podman pull docker.io/pytorch/pytorch:2", "Copying blob", "10%", "20%"]


def test_error_of_a_failed_image_pull_contains_the_reason_that_the_container_engine_printed(tmp_path):
    with pytest.raises(LauncherError) as caught:
        check_image(engine(tmp_path, REFUSES), "img:1", print)
    told = str(caught.value)
    assert "custom_docker_image='img:1' is not on this machine" in told
    assert "could not pull 'docker.io/library/img:1': initializing source: reading manifest: unauthorized." in told
    assert "podman login" in told


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("python:3.12", "docker.io/library/python:3.12"),
        ("pytorch/pytorch", "docker.io/pytorch/pytorch"),
        ("mcr.microsoft.com/azureml/base:1", "mcr.microsoft.com/azureml/base:1"),
        ("localhost/mine", "localhost/mine"),
        ("registry:5000/mine", "registry:5000/mine"),
        ("python@sha256:0123", "docker.io/library/python@sha256:0123"),
    ],
)
def test_image_without_a_registry_comes_from_docker_io(image, expected):
    assert full_name(image) == expected


@pytest.mark.parametrize("image", ["--privileged", "-v", "", " ", "two words", "a;b", "a\nb", "$(x)", "../x", "/x"])
def test_invalid_image_name_is_refused(image):
    with pytest.raises(LauncherError, match="is not the name of an image"):
        check_image_name(image)


def test_apptainer_pulls_docker_images_by_url_and_takes_image_files(tmp_path):
    apptainer = ContainerEngine(kind="apptainer", path="/nowhere", version="1")
    assert check_image(apptainer, "img:1", print) == "docker://img:1"
    assert check_image(apptainer, "oras://registry/img", print) == "oras://registry/img"
    file = tmp_path / "my image.sif"
    file.touch()
    assert check_image(apptainer, str(file), print) == str(file)


@pytest.mark.parametrize("size", ["512m", "8g", "2G", "1.5gb", "64MiB", "1048576", "1t"])
def test_valid_shm_sizes_are_accepted(size):
    check_shm_size(size)


@pytest.mark.parametrize("size", ["much", "", "-1g", "8 g", "8gg", "0", "0m", "1g --privileged"])
def test_invalid_shm_size_is_refused(size):
    with pytest.raises(LauncherError, match="is not a size"):
        check_shm_size(size)


def answer(**values):
    found = {"version": [3, 12, 4], "executable": "/opt/bin/python3", "mpirun": None, "mpirun_version": "", **values}
    return f"echo some notice; echo; printf '%s\\n' 'paceline-probe:{json.dumps(found)}'"


@pytest.fixture
def look(tmp_path):
    def look(text, **values):
        engine = ContainerEngine(kind="podman", path=str(fakes.program(tmp_path, "podman", text)), version="5")
        return probe(engine, "sha", run_id="r_1", name="img:1", **values)

    return look


def test_image_probe_returns_path_and_version_of_python_and_open_mpi_in_the_image(look):
    said: list[str] = []
    text = answer(mpirun="/opt/bin/mpirun", mpirun_version="mpirun (Open MPI) 5.0.8\n")
    assert look(text, say=said.append) == ImagePython(
        python="/opt/bin/python3", version=(3, 12, 4), mpirun="/opt/bin/mpirun", mpirun_version=(5, 0)
    )
    assert said == ["some notice"]


def test_mpich_in_an_image_is_ignored(look):
    found = look(answer(mpirun="/usr/bin/mpirun", mpirun_version="HYDRA build details: 4.2"))
    assert (found.mpirun, found.mpirun_version) == (None, None)


def test_image_with_python_before_3_10_is_refused(look):
    with pytest.raises(LauncherError, match=r"'img:1': its 'python3' is Python 3\.6\.9, and workers need 3\.10"):
        look(answer(version=[3, 6, 9]))


def test_container_engine_that_cannot_see_the_folders_of_this_machine_is_reported(look):
    from paceline.containers.command import INSIDE

    with pytest.raises(LauncherError, match="podman does not see this machine's folders"):
        look(f"echo \"python3: can't open file '{INSIDE}': [Errno 2] No such file or directory\" >&2; exit 2")


def test_image_probe_error_has_the_reason_of_the_container_engine(look):
    with pytest.raises(LauncherError, match="'img:1': podman could not start a container: no space left"):
        look("echo 'Error: no space left' >&2; exit 125")


def test_unusable_python_in_an_image_is_reported_with_its_output(look):
    with pytest.raises(LauncherError, match=r"does not run as Python 3\.10 or later does: Unknown option: -I"):
        look("echo 'Unknown option: -I' >&2; exit 2")
