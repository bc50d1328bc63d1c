from __future__ import annotations

import pytest

from paceline.parallel.errors import ParallelError
from paceline.parallel.strategy import Layout
from tests.late import late

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global mesh
    from paceline.parallel import mesh


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "has_cuda", "backend"),
    [
        ({}, False, None),
        ({}, True, None),
        # A shell may still have these variables, although no launcher has started the process.
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}, False, None),
        (LAUNCHED, False, "gloo"),
        (LAUNCHED, True, "cpu:gloo,cuda:nccl"),
        (LAUNCHED | {"OMPI_COMM_WORLD_SIZE": "2"}, False, "mpi"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False, "mpi"),
        # mpirun has started torchrun once on each of three nodes.
        (LAUNCHED | {"OMPI_COMM_WORLD_SIZE": "3"}, False, "gloo"),
        # The shell of a batch script has SLURM_NTASKS, but it is a single process.
        ({"SLURM_NTASKS": "8"}, False, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False, None),
    ],
)
def test_backend_is_none_without_launcher_mpi_under_mpirun_and_gloo_or_nccl_under_torchrun(
    environment: dict[str, str], has_cuda: bool, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_has_mpi4py", lambda: True)
    assert mesh.choose_backend(environment, has_cuda) == backend


@pytest.mark.promise("there-silent-world-one")
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "4"}, "one of 4, but RANK, MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "one of 4, but RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "with mpirun install mpi4py"),
    ],
)
def test_incomplete_launch_raises_instead_of_running_alone(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_has_mpi4py", lambda: False)
    with pytest.raises(ParallelError, match=words):
        mesh.choose_backend(environment, False)


def test_mesh_without_a_launcher_has_one_rank() -> None:
    place = mesh.start("cpu")
    assert (place.rank, place.size, place.device) == (0, 1, torch.device("cpu"))
    world = mesh.build(place, Layout())
    assert world.group("data", "pipe") is None
    assert world.store is None
    assert not torch.distributed.is_initialized()


def test_ranks_of_a_tensor_group_are_adjacent() -> None:
    layout = Layout(pipe=2, data=2, shard=1, tensor=2)
    found = [mesh.coordinates(layout, rank) for rank in range(8)]
    assert [place["tensor"] for place in found] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [place["data"] for place in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place["pipe"] for place in found] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_gloo_on_gpus_is_refused_for_other_strategies_than_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.dist, "get_backend", lambda: "gloo")
    place = mesh.WorldPlace(rank=0, size=2, device=torch.device("cuda", 0))
    with pytest.raises(
        ParallelError, match=r"shard 2 on GPUs needs NCCL, .* the backend 'gloo'\. Make it .*'cpu:gloo,cuda:nccl'"
    ):
        mesh.build(place, Layout(shard=2))
