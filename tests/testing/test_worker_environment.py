"""Variables that the suite expects in a worker's environment, and those that it refuses."""

from __future__ import annotations

from paceline.testing.worker_environment import comparable, foreign

FOUND = {
    "PATH": "/bin",
    "RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "20001",
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:20002",
    "AZ_BATCH_MASTER_NODE": "10.0.0.1:20001",
    "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.1",
    "PACELINE_RUN_ID": "a_1_b",
    "PACELINE_RUN_SECRET": "1234",
    "PACELINE_WATCH_DIR": "/dev/shm/paceline-1/watch_1",
    "PACELINE_WORKSPACE": "/home/me/ws",
    "PACELINE_RUN_DIR": "/home/me/ws/runs/a_1_b",
    "PACELINE_OUTPUT_DIR": "/home/me/ws/runs/a_1_b/outputs",
    "AZUREML_SOURCE_DIRECTORY": "/home/me/ws/runs/a_1_b/work",
}


def test_unexpected_slurm_or_paceline_variables_in_a_worker_are_reported() -> None:
    assert foreign(FOUND, FOUND) == []
    assert foreign({**FOUND, "SLURM_PROCID": "0", "PACELINE_OTHER": "x", "EDITOR": "vi"}, FOUND) == [
        "PACELINE_OTHER",
        "SLURM_PROCID",
    ]


def test_mpirun_variables_are_allowed_only_under_mpirun() -> None:
    of_mpirun = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}
    assert foreign({**FOUND, **of_mpirun}, FOUND) == []
    assert foreign({**FOUND, "PMIX_RANK": "1"}, FOUND) == ["PMIX_RANK"]


def test_environments_of_two_runs_are_compared_without_addresses_and_ids() -> None:
    elsewhere = {
        **FOUND,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "30001",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:30002",
        "AZ_BATCH_MASTER_NODE": "127.0.0.1:30001",
        "AZ_BATCHAI_MPI_MASTER_NODE": "127.0.0.1",
        "PACELINE_RUN_ID": "a_2_c",
        "PACELINE_RUN_SECRET": "5678",
        "PACELINE_WATCH_DIR": "/dev/shm/paceline-2/watch_1",
        "PACELINE_WORKSPACE": "/tmp/ws",
        "PACELINE_RUN_DIR": "/tmp/ws/runs/a_2_c",
        "PACELINE_OUTPUT_DIR": "/tmp/ws/runs/a_2_c/outputs",
        "AZUREML_SOURCE_DIRECTORY": "/tmp/ws/runs/a_2_c/work",
    }
    assert comparable(FOUND, FOUND) == comparable(elsewhere, FOUND)
    assert comparable(FOUND, FOUND)["PACELINE_OUTPUT_DIR"] == "<run folder>/outputs"
    assert comparable(FOUND, FOUND) != comparable({**elsewhere, "RANK": "0"}, FOUND)
