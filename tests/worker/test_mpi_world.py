from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.errors import RunContextError
from paceline.worker.mpi_world import check


def mpi(size: int, *, initialized: bool = True):
    """mpi4py's module, as far as it is looked at."""
    return SimpleNamespace(
        Is_initialized=lambda: initialized,
        COMM_WORLD=SimpleNamespace(Get_size=lambda: size),
        Get_library_version=lambda: "Open MPI v4.1.4, package: Debian OpenMPI\0",
    )


def test_a_world_of_all_workers_passes_and_one_that_is_yet_to_come_too():
    check(mpi(4), 4)
    check(mpi(1, initialized=False), 4)


def test_a_world_of_one_is_refused_with_the_library_and_the_way_out():
    with pytest.raises(
        RunContextError, match=r"started 4 workers, but MPI's world has 1: Open MPI v4.1.4 does not .*mpi='mpirun'"
    ):
        check(mpi(1), 4)


def test_the_import_of_mpi4py_is_what_fails(tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(
        "class COMM_WORLD:\n    Get_size = staticmethod(lambda: 1)\n"
        "Is_initialized = lambda: True\nGet_library_version = lambda: 'Open MPI v4'\n"
    )
    script = "from paceline.worker import mpi_world; mpi_world.check_when_loaded(2)\nfrom mpi4py import MPI"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "RunContextError: srun started 2 workers, but MPI's world has 1" in done.stderr
