from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.errors import RunContextError
from paceline.worker.ranks import check, take_place

GIVEN = {
    "PMIX_RANK": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_GTIDS": "2,3",
    "SLURMD_NODENAME": "n1",
    "SLURM_STEP_ID": "0",
    "PATH": "/bin",
}
PLACES = ("--for", "0-1", "--on", "n0", "--set", "A=0", "--for", "2-3", "--on", "n1", "--set", "A=1")


def test_srun_worker_has_mpirun_variables_and_no_slurm_ones():
    environment = dict(GIVEN)
    take_place(environment, PLACES)
    assert environment == {
        "PMIX_RANK": "3",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "PATH": "/bin",
    }


def test_srun_worker_gets_the_variables_given_for_all_workers_for_its_node_or_for_its_rank():
    options = ("--set", "SLURM_MINE=1", *PLACES, "--for", "3-3", "--set", "GPU=7", "--for", "2-2", "--set", "GPU=6")
    assert take_place(dict(GIVEN), options) == ["--set", "SLURM_MINE=1", "--set", "A=1", "--set", "GPU=7"]
    other = GIVEN | {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n0"}
    assert take_place(other, options) == ["--set", "SLURM_MINE=1", "--set", "A=0"]


def test_slurm_variables_needed_by_open_mpi_4_are_kept():
    environment = dict(GIVEN)
    assert take_place(environment, ("--keep", "SLURM_STEP_ID", *PLACES)) == ["--set", "A=1"]
    assert [name for name in environment if name.startswith("SLURM")] == ["SLURM_STEP_ID"]


def test_a_worker_on_another_node_than_planned_is_an_error():
    with pytest.raises(RunContextError, match="srun started rank 3 on node n0, but its place is on n1"):
        take_place(GIVEN | {"SLURMD_NODENAME": "n0"}, PLACES)


@pytest.mark.parametrize("changed", [{"PMIX_RANK": None}, {"PMIX_RANK": "0"}])
def test_srun_without_pmix_raises_instead_of_running_alone(changed):
    environment = {name: value for name, value in (GIVEN | changed).items() if value is not None}
    with pytest.raises(RunContextError, match=r"PMIX_RANK=(None|'0'), SLURM_PROCID='3': .*mpi='mpirun'"):
        take_place(environment, PLACES)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"])
def test_missing_srun_variable_raises(name):
    environment = {key: text for key, text in GIVEN.items() if key != name}
    with pytest.raises(RunContextError, match=f"{name}=None: srun sets it"):
        take_place(environment, PLACES)


def mpi(size: int, *, initialized: bool = True):
    """Return a stand-in for mpi4py's module, as far as it is used."""
    return SimpleNamespace(
        Is_initialized=lambda: initialized,
        COMM_WORLD=SimpleNamespace(Get_size=lambda: size),
        Get_library_version=lambda: "Open MPI v4.1.4, package: Debian OpenMPI\0",
    )


def test_mpi_world_of_all_workers_is_accepted():
    check(mpi(4), 4)
    check(mpi(1, initialized=False), 4)


def test_error_for_an_mpi_world_of_one_rank_names_the_mpi_library_and_the_next_step():
    with pytest.raises(
        RunContextError, match=r"started 4 workers, but MPI's world has 1: Open MPI v4.1.4 does not .*mpi='mpirun'"
    ):
        check(mpi(1), 4)


def test_wrong_mpi_world_fails_at_the_import_of_mpi4py(tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(
        "class COMM_WORLD:\n    Get_size = staticmethod(lambda: 1)\n"
        "Is_initialized = lambda: True\nGet_library_version = lambda: 'Open MPI v4'\n"
    )
    script = "from paceline.worker import ranks; ranks.check_when_loaded(2)\nfrom mpi4py import MPI"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "RunContextError: srun started 2 workers, but MPI's world has 1" in done.stderr
