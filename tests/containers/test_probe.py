from __future__ import annotations

import json

import pytest

from paceline.containers import ContainerEngine, ImagePython, probe
from paceline.errors import LauncherError
from tests.containers import fakes


def answer(**values):
    found = {"version": [3, 12, 4], "executable": "/opt/bin/python3", "mpirun": None, "mpirun_version": "", **values}
    return f"echo some notice; echo; printf '%s\\n' 'paceline-probe:{json.dumps(found)}'"


@pytest.fixture
def look(tmp_path):
    def look(text, **values):
        engine = ContainerEngine(kind="podman", path=str(fakes.program(tmp_path, "podman", text)), version="5")
        return probe(engine, "sha", run_id="r_1", name="img:1", **values)

    return look


def test_the_images_python_and_open_mpi_come_back(look):
    said: list[str] = []
    text = answer(mpirun="/opt/bin/mpirun", mpirun_version="mpirun (Open MPI) 5.0.8\n")
    assert look(text, say=said.append) == ImagePython(
        python="/opt/bin/python3", version=(3, 12, 4), mpirun="/opt/bin/mpirun", mpirun_version=(5, 0)
    )
    assert said == ["some notice"]


def test_another_mpi_is_none(look):
    found = look(answer(mpirun="/usr/bin/mpirun", mpirun_version="HYDRA build details: 4.2"))
    assert (found.mpirun, found.mpirun_version) == (None, None)


def test_a_python_before_3_10_is_refused_with_its_version(look):
    with pytest.raises(LauncherError, match=r"'img:1': its 'python3' is Python 3\.6\.9, and workers need 3\.10"):
        look(answer(version=[3, 6, 9]))


def test_an_engine_that_does_not_see_this_machines_folders_is_told(look):
    from paceline.containers.command import INSIDE

    with pytest.raises(LauncherError, match="podman does not see this machine's folders"):
        look(f"echo \"python3: can't open file '{INSIDE}': [Errno 2] No such file or directory\" >&2; exit 2")


def test_an_engine_that_fails_is_told_with_its_reason(look):
    with pytest.raises(LauncherError, match="'img:1': podman could not start a container: no space left"):
        look("echo 'Error: no space left' >&2; exit 125")


def test_a_python_that_is_none_is_told_with_what_it_said(look):
    with pytest.raises(LauncherError, match=r"does not run as Python 3\.10 or later does: Unknown option: -I"):
        look("echo 'Unknown option: -I' >&2; exit 2")
