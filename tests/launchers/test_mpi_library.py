from __future__ import annotations

import sys

import pytest

from paceline.launchers.mpi_library import MpiLibrary, mpi4py_library
from tests.helpers import write_program


@pytest.mark.parametrize(
    ("script", "library"),
    [
        ("echo 'Open MPI v5.0.11, package: Open MPI a@b, ident: 5'", MpiLibrary("Open MPI v5.0.11", (5, 0))),
        ("echo 'Open MPI v4.1.4, package: x'", MpiLibrary("Open MPI v4.1.4", (4, 1))),
        ("printf 'MPICH Version:      4.2.0\\nMPICH ABI: 16\\n'", MpiLibrary("MPICH Version:      4.2.0", None)),
        ("echo 'Intel(R) MPI Library 2021.11'", MpiLibrary("Intel(R) MPI Library 2021.11", None)),
        ("echo 'ModuleNotFoundError: mpi4py' >&2; exit 1", None),
        ("echo 'Open MPI v5.0.11'; kill -9 $$", None),
        ("exit 0", None),
    ],
)
def test_the_library_is_what_mpi4py_says(tmp_path, script, library):
    python = write_program(tmp_path / "python", f"#!/bin/sh\n{script}\n")
    assert mpi4py_library(str(python)) == library


def test_an_interpreter_that_is_not_there_has_none(tmp_path):
    assert mpi4py_library(str(tmp_path / "nowhere")) is None


def test_this_interpreter_is_asked_without_initialising_mpi():
    pytest.importorskip("mpi4py")
    found = mpi4py_library(sys.executable)
    assert found is None or found.name
