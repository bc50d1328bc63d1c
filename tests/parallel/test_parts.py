"""The small rules below the loop: decisions of "auto", sharded blocks, differences of two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.parallel.errors import ParallelError
from paceline.parallel.strategy import DataParallel, FullyShard, PipelineParallel
from tests.late import late

torch, nn, models = late("torch"), late("torch.nn"), late("tests.parallel.models")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global \
        Block, \
        Measured, \
        Skeleton, \
        available_bytes, \
        decide, \
        is_communication, \
        Streams, \
        derive, \
        find_units, \
        first_difference, \
        find
    from paceline.parallel.auto import available_bytes, decide
    from paceline.parallel.deterministic_rng import Streams, derive
    from paceline.parallel.failure import is_communication
    from paceline.parallel.forecast.predict import Measured
    from paceline.parallel.initial_broadcast import first_difference
    from paceline.parallel.meta_model import Skeleton
    from paceline.parallel.pipeline.cut import Block
    from paceline.parallel.replicas.shard import find_units
    from paceline.parallel.tied_parameters import find


GIB = 2**30


def needs(fixed: float, unit: float, activations: float, seconds: float = 1.0, bandwidth: float = 1e12) -> Any:
    """Eight equal blocks. fixed: GiB of parameters, gradients and two moments; activations: of all rows."""
    blocks = tuple(
        Block(
            name=str(index),
            forward_s=seconds / 24,
            backward_s=seconds / 12,
            parameters=((str(index), int(fixed * GIB / 32)),),
            activation_bytes=int(activations * GIB / 8),
            live_bytes=2**20,
        )
        for index in range(8)
    )
    return Measured(rows=8, all_rows=8, blocks=blocks, unit_bytes=int(unit * GIB), bandwidth_bytes_s=bandwidth)


@pytest.mark.promise("auto-takes-fastest-layout-fits")
@pytest.mark.parametrize(
    ("measured", "microbatches", "strategy"),
    [
        (lambda: needs(4, 0.1, 4), 1, DataParallel(2)),
        (lambda: needs(12, 0.1, 4), 1, FullyShard(2)),
        # FullyShard does not fit: the gathered blocks need more than a worker has.
        (lambda: needs(12, 1.0, 2), 4, PipelineParallel(2)),
        # All layouts fit. But over this network, the messages of the other layouts take longer than the idle time of a
        # pipeline.
        (lambda: needs(4, 0.1, 0.1, bandwidth=1e9), 8, PipelineParallel(2)),
    ],
)
def test_auto_strategy_is_the_fastest_layout_that_fits_into_memory(
    measured: Callable[[], Any], microbatches: int, strategy: object
) -> None:
    choice = decide(measured(), 2, 12 * GIB, microbatches, microbatches)
    assert choice.strategy == strategy
    assert "12 GiB" in choice.reason
    assert " ms" in choice.reason
    assert choice.limit_bytes == int(0.8 * 12 * GIB)


def test_auto_reports_the_missing_memory_if_nothing_fits() -> None:
    with pytest.raises(ParallelError, match=r"DataParallel\(2\) 10[0-9] GiB.* Give more workers, .* or microbatches=2"):
        decide(needs(100, 1, 1), 2, 12 * GIB, 1, 1)


def test_free_memory_of_this_machine_is_positive() -> None:
    assert available_bytes(torch.device("cpu")) > 0


def test_fsdp_sharding_units_are_blocks_of_containers_or_modules_that_match_given_patterns() -> None:
    assert find_units(models.Transformer(tied=True)) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    assert find_units(models.Cnn("batch"), ("blocks.*.0",)) == ["blocks.0.0", "blocks.1.0", "blocks.2.0"]
    assert find_units(nn.Linear(2, 2)) == []
    with pytest.raises(ParallelError, match=r"'layers\.\*'.* matches no module"):
        find_units(models.Cnn("batch"), ("layers.*",))


def test_blocks_with_a_shared_tensor_are_no_sharding_units() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model[2].weight = model[0].weight
    assert find_units(model) == ["1"]
    shared = nn.Linear(2, 2)
    assert find_units(nn.Sequential(shared, nn.Linear(2, 2), shared)) == ["1"]


def test_ties_are_found_among_parameters_and_buffers() -> None:
    assert find(models.Transformer(tied=True)) == (("tok.weight", "head.weight"),)
    assert find(models.Transformer(tied=False)) == ()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    assert find(model) == (("0.running_mean", "1.running_mean"),)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*not a leaf Tensor:UserWarning")
def test_model_with_a_scripted_block_is_rebuilt_from_a_meta_copy_and_saved_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2)))
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    filled = Skeleton(model).filled(values, torch.device("cpu"))
    assert all(torch.equal(tensor, values[name]) for name, tensor in filled.state_dict().items())


def test_model_difference_message_names_a_parameter_missing_on_some_ranks() -> None:
    same = ["model: M", "parameter a: [1]", "parameter b: [2]"]
    more = ["model: M", "parameter a: [1]", "parameter extra: [7]", "parameter b: [2]"]
    told = first_difference([same, more, same])
    assert "parameter extra is none on ranks 0, 2; [7] on rank 1" in told
    other = ["model: M", "parameter a: [3]", "parameter b: [2]"]
    assert "parameter a is [1] on rank 0; [3] on rank 1" in first_difference([same, other])


def test_random_numbers_depend_only_on_seed_step_replica_and_stage() -> None:
    def drawn(step: int, replica: int, stage: int) -> float:
        streams = Streams(seed=1, replica=replica, stage=stage, device=torch.device("cpu"), active=True)
        with streams.use("step", step):
            return float(torch.rand(()))

    assert drawn(3, 1, 0) == drawn(3, 1, 0)
    assert len({drawn(3, 1, 0), drawn(4, 1, 0), drawn(3, 0, 0), drawn(3, 1, 1)}) == 4
    # These numbers must never change, because a training that resumes from a checkpoint derives them again.
    assert derive("step", 1, 2, 3, 4) == derive("step", 1, 2, 3, 4)
    assert derive("step", 1, 2, 3, 4) != derive("step", 12, 3, 4)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("Connection closed by peer"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_runtime_error_of_a_closed_connection_is_recognized_as_a_communication_error(
    error: Exception, is_one: bool
) -> None:
    assert is_communication(error) == is_one


def test_nccl_error_is_recognized_as_a_lost_rank() -> None:
    assert is_communication(torch.distributed.DistBackendError("NCCL error"))


def test_batch_tensors_are_copied_to_the_cpu_with_a_blocking_copy() -> None:
    """Where the copy is not waited for, a GPU's tensor is read before it has come."""
    from torch.overrides import TorchFunctionMode

    from paceline.parallel.batches.rows import move

    asked = []

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.to:
                asked.append((str(args[1]), kwargs["non_blocking"]))
            return func(*args, **(kwargs or {}))

    with Noted():
        for device in ("cpu", "meta"):
            move([torch.ones(2)], torch.device(device))
    assert asked == [("cpu", False), ("meta", True)]
