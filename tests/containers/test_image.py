from __future__ import annotations

import pytest

from paceline.containers import ContainerEngine, check_image, check_image_name, check_shm_size
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


def test_an_image_that_is_there_is_not_pulled(tmp_path):
    said: list[str] = []
    assert check_image(engine(tmp_path, HAS_IT), "img:1", said.append) == "abc123"
    assert said == []


def test_an_image_that_is_not_there_is_pulled_live(tmp_path):
    said: list[str] = []
    assert check_image(engine(tmp_path, PULLS_IT), "pytorch/pytorch:2", said.append) == "abc123"
    assert said == ["podman pull docker.io/pytorch/pytorch:2", "Copying blob", "10%", "20%"]


def test_a_pull_that_fails_is_told_with_the_engines_reason(tmp_path):
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
def test_a_name_without_a_registry_is_dockers(image, expected):
    assert full_name(image) == expected


@pytest.mark.parametrize("image", ["--privileged", "-v", "", " ", "two words", "a;b", "a\nb", "$(x)", "../x", "/x"])
def test_what_can_not_be_a_name_is_refused(image):
    with pytest.raises(LauncherError, match="is not the name of an image"):
        check_image_name(image)


def test_apptainer_gets_docker_images_by_their_address_and_files_by_their_path(tmp_path):
    apptainer = ContainerEngine(kind="apptainer", path="/nowhere", version="1")
    assert check_image(apptainer, "img:1", print) == "docker://img:1"
    assert check_image(apptainer, "oras://registry/img", print) == "oras://registry/img"
    file = tmp_path / "my image.sif"
    file.touch()
    assert check_image(apptainer, str(file), print) == str(file)


@pytest.mark.parametrize("size", ["512m", "8g", "2G", "1.5gb", "64MiB", "1048576", "1t"])
def test_a_size_has_a_number_and_a_unit(size):
    check_shm_size(size)


@pytest.mark.parametrize("size", ["much", "", "-1g", "8 g", "8gg", "0", "0m", "1g --privileged"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(LauncherError, match="is not a size"):
        check_shm_size(size)
