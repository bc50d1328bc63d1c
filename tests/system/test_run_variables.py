"""Ranks that a program inside a run has started."""

from __future__ import annotations

import pytest

from paceline.system.run_variables import nested_rank

ALONE = {"PACELINE_RUN_ID": "digits_1_2", "PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1"}
SECOND_OF_TWO = {"PACELINE_RUN_ID": "digits_1_2", "PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "2"}
OF_THE_RUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "digits_1_2"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (ALONE, None),
        (ALONE | {"RANK": "-1", "WORLD_SIZE": "1"}, None),
        (ALONE | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        # torchrun, accelerate and deepspeed set these variables.
        (ALONE | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, (1, 2)),
        # Lightning sets these variables for the processes that it starts.
        (ALONE | {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}, (1, 2)),
        (ALONE | {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "1"}, None),
        # mpirun of Open MPI sets these variables.
        (ALONE | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        # A process of mp.spawn has this variable once it has joined a group.
        (ALONE | {"PACELINE_NESTED_RANK": "1/2"}, (1, 2)),
        (SECOND_OF_TWO, None),
        (SECOND_OF_TWO | OF_THE_RUN, None),
        (SECOND_OF_TWO | OF_THE_RUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, None),
        # A process started by one of several workers gets a number that no worker has, because each worker may start a rank 1.
        (SECOND_OF_TWO | OF_THE_RUN | {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0"}, (1, 2)),
        (SECOND_OF_TWO | OF_THE_RUN | {"TORCHELASTIC_RUN_ID": "none"}, (3, 2)),
        (SECOND_OF_TWO | OF_THE_RUN | {"PACELINE_NESTED_RANK": "1/2"}, (3, 2)),
        (SECOND_OF_TWO | {"PACELINE_NESTED_RANK": "2/4"}, (5, 4)),
        (SECOND_OF_TWO | OF_THE_RUN | {"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
    ],
)
def test_rank_started_by_a_script_is_distinguished_from_a_worker_of_the_run(variables, found):
    assert nested_rank(variables) == found
