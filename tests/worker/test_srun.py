from __future__ import annotations

import pytest

from paceline.errors import RunContextError
from paceline.worker.srun import take_place

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


def test_a_worker_finds_what_mpirun_would_have_set_and_nothing_of_slurm_s():
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


def test_each_worker_takes_what_is_all_workers_its_node_s_and_its_own():
    options = ("--set", "SLURM_MINE=1", *PLACES, "--for", "3-3", "--set", "GPU=7", "--for", "2-2", "--set", "GPU=6")
    assert take_place(dict(GIVEN), options) == ["--set", "SLURM_MINE=1", "--set", "A=1", "--set", "GPU=7"]
    other = GIVEN | {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n0"}
    assert take_place(other, options) == ["--set", "SLURM_MINE=1", "--set", "A=0"]


def test_what_open_mpi_4_needs_of_slurm_s_is_kept():
    environment = dict(GIVEN)
    assert take_place(environment, ("--keep", "SLURM_STEP_ID", *PLACES)) == ["--set", "A=1"]
    assert [name for name in environment if name.startswith("SLURM")] == ["SLURM_STEP_ID"]


def test_a_worker_on_another_node_than_planned_is_an_error():
    with pytest.raises(RunContextError, match="srun started rank 3 on node n0, but its place is on n1"):
        take_place(GIVEN | {"SLURMD_NODENAME": "n0"}, PLACES)


@pytest.mark.parametrize("changed", [{"PMIX_RANK": None}, {"PMIX_RANK": "0"}])
def test_an_srun_without_pmix_is_an_error_and_no_world_of_one(changed):
    environment = {name: value for name, value in (GIVEN | changed).items() if value is not None}
    with pytest.raises(RunContextError, match=r"PMIX_RANK=(None|'0'), SLURM_PROCID='3': .*mpi='mpirun'"):
        take_place(environment, PLACES)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"])
def test_a_variable_that_srun_did_not_set_is_an_error(name):
    environment = {key: text for key, text in GIVEN.items() if key != name}
    with pytest.raises(RunContextError, match=f"{name}=None: srun sets it"):
        take_place(environment, PLACES)
