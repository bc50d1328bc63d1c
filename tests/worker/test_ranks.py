from __future__ import annotations

import pytest

from paceline.errors import RunContextError
from paceline.worker.ranks import from_open_mpi

GIVEN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "PACELINE_RUN_DIR": "/ws/runs/a",
    "PACELINE_ATTEMPT": "2",
}


def test_rank_variables_are_set_from_those_of_mpirun():
    environment = dict(GIVEN)
    from_open_mpi(environment)
    assert environment == GIVEN | {
        "PACELINE_RANK": "3",
        "RANK": "3",
        "JAX_PROCESS_ID": "3",
        "HOROVOD_RANK": "3",
        "LOCAL_RANK": "1",
        "HOROVOD_LOCAL_RANK": "1",
        "TORCHELASTIC_ERROR_FILE": "/ws/runs/a/attempts/2/error_3.json",
    }


def test_local_rank_given_on_the_command_line_is_kept():
    # Open MPI counts local ranks by host, even if a host stands for several nodes.
    environment = GIVEN | {"LOCAL_RANK": "0", "HOROVOD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    from_open_mpi(environment)
    assert (environment["LOCAL_RANK"], environment["HOROVOD_LOCAL_RANK"]) == ("0", "0")


def test_rank_variable_left_by_a_shell_is_replaced():
    environment = GIVEN | {"RANK": "0"}
    from_open_mpi(environment)
    assert environment["RANK"] == "3"


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
@pytest.mark.parametrize("value", [None, "", "x"])
def test_missing_mpirun_variable_raises(name, value):
    environment = {key: text for key, text in GIVEN.items() if key != name} | ({} if value is None else {name: value})
    with pytest.raises(RunContextError, match=f"{name}={value!r}: Open MPI's mpirun sets it"):
        from_open_mpi(environment)


def test_wrong_number_of_workers_raises():
    with pytest.raises(RunContextError, match="mpirun started 4 workers, but the job has 8"):
        from_open_mpi(GIVEN | {"WORLD_SIZE": "8"})
