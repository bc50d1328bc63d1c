"""Checkpoints: their content, refusals before anything changes, changes of the model that the training did not make."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.parallel import CheckpointError, DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel
from paceline.parallel.checkpoint import folder as folders
from tests.parallel.equality import adamw, alone, batches, made
from tests.parallel.models import CASES, SHALLOW, Case, Mlp, dropping, vectors

STRATEGIES = (DataParallel(), FullyShard(), PipelineParallel(), TensorParallel())
LIMIT = 1e-10


def started(
    case: Case, strategy: Any, *, seed: int = 5, optimizer: Any = adamw, **options: Any
) -> tuple[Any, list[Any]]:
    """The case on this layout, and its batches."""
    model = made(case, torch.float64, seed=seed)
    given = batches(case, torch.float64, (8,) * 6)
    # Switch the comparison in the first step off, because these checks compare more.
    options = {"loss": case.loss, "loss_weight": case.loss_weight, "microbatches": 2, "check": "off"} | options
    return paceline.parallelize(model, optimizer(model), given, strategy=strategy, **options), given


def values(par: Any) -> dict[str, torch.Tensor]:
    return par.full_state_dict()  # type: ignore[no-any-return]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], limit: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        apart = float((tensor.double() - other[name].double()).abs().max())
        assert apart <= limit, f"{name} differs by {apart:g}"


def check_full_state_dict_equals_that_of_the_plain_model(ranks: Any) -> None:
    _, shard, pipe, _ = STRATEGIES
    whole = dict.fromkeys(("transformer_tied", "cnn_batch"), STRATEGIES)
    # `make test` uses a layout that splits tensors, and a layout that has whole tensors on a single stage. The tests in
    # tests/parallel/checkpoint cover split layers and replicas.
    covering = {"transformer_tied": (shard,), "cnn_batch": (pipe,)}
    for name, several in ranks.cells(covering, whole).items():
        for strategy in several:
            par, given = started(SHALLOW[name], strategy)
            assert_same(values(par), made(SHALLOW[name], torch.float64).state_dict())
            par.step(given[0])
            state = values(par)
            par.step(given[1])
            assert not any(tensor.requires_grad for tensor in state.values())
            after = values(par)
            assert any(not torch.equal(tensor, after[key]) for key, tensor in state.items()), "the copy moves along"
            plain = made(SHALLOW[name], torch.float64, seed=8)
            plain.load_state_dict(after)


def check_buffers_schedulers_groups_and_momentum_resume(ranks: Any) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        decayed = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    # `make test` uses a layout that splits the states of the optimizer, and a layout that has buffers on a single
    # stage. The tests in tests/parallel/checkpoint cover replicas.
    for strategy in ranks.cells((FullyShard(), PipelineParallel()), STRATEGIES):
        case = CASES["cnn_batch"]
        straight, given = started(case, strategy, optimizer=grouped)
        schedule = torch.optim.lr_scheduler.StepLR(straight.optimizer, step_size=2, gamma=0.5)
        for number, batch in enumerate(given):
            straight.step(batch)
            schedule.step()
            if number == 2:
                straight.save(ranks.folder / "half", schedulers=[schedule])
        resumed, given = started(case, strategy, seed=6, optimizer=grouped)
        again = torch.optim.lr_scheduler.StepLR(resumed.optimizer, step_size=2, gamma=0.5)
        assert resumed.load(ranks.folder / "half", schedulers=[again])
        for batch in given[3:]:
            resumed.step(batch)
            again.step()
        assert again.get_last_lr() == schedule.get_last_lr() == [0.0125, 0.00625]
        assert_same(values(straight), values(resumed), LIMIT)


def check_checkpoint_of_a_combined_layout_resumes_on_another_combined_layout(
    ranks: Any, sizes: tuple[int, ...] = (4,)
) -> None:
    """Also what the matrix of layouts leaves out; each goes on from the one before."""
    covering = (
        FullyShard(2) @ PipelineParallel(2),
        DataParallel(2) @ FullyShard(2),
        FullyShard(2) @ TensorParallel(2),
    )
    # `make proof` adds layouts whose tensors are split by one strategy instead of two. It also adds layouts that
    # tests/parallel/checkpoint covers with another pipeline schedule: a checkpoint does not depend on the schedule.
    layouts = ranks.cells(
        covering,
        (
            *covering,
            DataParallel(2) @ TensorParallel(2),
            DataParallel(2) @ PipelineParallel(2, schedule="interleaved"),
            PipelineParallel(4, schedule="gpipe"),
        ),
    )
    case = SHALLOW["transformer_tied"]
    microbatches = ranks.cells(2, 4)
    given = batches(case, torch.float64, (8,) * 6)
    for number, (strategy, batch) in enumerate(zip(layouts, given, strict=False)):
        straight = alone(case, microbatches=microbatches, rows=(8,) * (number + 1))
        # Start with other parameters, so that the check fails unless the load replaces them.
        par, _ = started(case, strategy, seed=number or 5, microbatches=microbatches)
        if number:
            par.load(ranks.folder / "last")
        par.step(batch)
        par.save(ranks.folder / "last")
        # Tied parameters must be in the state under each of their names.
        plain = made(case, torch.float64)
        plain.load_state_dict(straight.parameters, strict=False)
        assert_same(plain.state_dict(), values(par), LIMIT)


def check_resumed_training_draws_the_same_dropout(ranks: Any) -> None:
    case = dropping(0.3)
    # Give the cut explicitly. Measured times may lead to different cuts, and a stage would draw other random numbers.
    pipe = PipelineParallel(cut=("blocks.1",))
    # `make test` leaves out FullyShard, because replicas draw the same numbers whether they are sharded or not.
    for strategy in ranks.cells(
        (DataParallel(), pipe, TensorParallel()), (DataParallel(), FullyShard(), pipe, TensorParallel())
    ):
        straight, given = started(case, strategy)
        for number, batch in enumerate(given[:3]):
            straight.step(batch)
            if number == 0:
                straight.save(ranks.folder / "dropout")
        resumed, given = started(case, strategy, seed=6)
        resumed.load(ranks.folder / "dropout")
        for batch in given[1:3]:
            resumed.step(batch)
        assert_same(values(straight), values(resumed), LIMIT)


def check_frozen_parameters_are_saved(ranks: Any) -> None:
    def make() -> nn.Module:
        model = Mlp()
        model.first.requires_grad_(False)
        return model

    def some(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    case = Case(name="frozen", make=make, batch=vectors)
    for strategy in ranks.cells((FullyShard(), PipelineParallel()), STRATEGIES):
        par, given = started(case, strategy, optimizer=some)
        par.step(given[0])
        par.save(ranks.folder / "frozen")
        expected = values(par)
        other, _ = started(case, strategy, seed=6, optimizer=some)
        other.load(ranks.folder / "frozen")
        assert_same(values(other), expected)


def check_loading_the_checkpoint_of_another_model_raises_and_changes_nothing(ranks: Any) -> None:
    class Longer(Mlp):
        def __init__(self) -> None:
            super().__init__(depth=5)

    class Wider(Mlp):
        def __init__(self) -> None:
            super().__init__(width=32)

    par, given = started(CASES["mlp"], DataParallel())
    par.step(given[0])
    par.save(ranks.folder / "mlp")
    for number, (make, message) in enumerate(
        (
            (Longer, r"it has no 'blocks\.4\.weight', which the model has"),
            (lambda: Mlp(depth=3), r"it has 'blocks\.3\.(weight|bias)', which the model has not"),
            (Wider, r"'first\.weight' has the shape \[24, 12\] there and \[32, 12\] in the model"),
        )
    ):
        # The error must name the shape of the whole tensor, even if the tensor is split over ranks.
        for strategy in ranks.cells((*STRATEGIES[number : number + 1], *STRATEGIES[3:][: number // 2]), STRATEGIES):
            other, given = started(Case(name="other", make=make, batch=vectors), strategy)
            before = values(other)
            with pytest.raises(ParallelError, match=message):
                other.load(ranks.folder / "mlp")
            assert_same(values(other), before)
            other.step(given[0])
    sgd, _ = started(CASES["mlp"], DataParallel(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ParallelError, match="it has a state of AdamW, and the optimizer is SGD"):
        sgd.load(ranks.folder / "mlp")
    with pytest.raises(ParallelError, match="the states of 0 schedulers, and load"):
        par.load(ranks.folder / "mlp", schedulers=[torch.optim.lr_scheduler.ConstantLR(par.optimizer)])


def check_loading_a_missing_checkpoint_raises(ranks: Any) -> None:
    par, _ = started(CASES["mlp"], DataParallel())
    with pytest.raises(ParallelError, match="nowhere' is not there") as caught:
        par.load(ranks.folder / "nowhere")
    assert caught.value.__cause__ is None, "the same is not said twice"
    (ranks.folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(ParallelError, match="has no complete checkpoint"):
        par.load(ranks.folder / "empty")
    (ranks.folder / "file").write_text("mine")
    dist.barrier()
    with pytest.raises(ParallelError, match="is there and is not a checkpoint"):
        par.save(ranks.folder / "file")
    assert (ranks.folder / "file").read_text() == "mine"


def check_save_and_load_use_the_checkpoint_folder_of_the_run_by_default(ranks: Any) -> None:
    folder = ranks.folder / "with space"
    os.environ["PACELINE_CHECKPOINT_DIR"] = str(folder)
    try:
        par, given = started(CASES["mlp"], DataParallel())
        assert not par.load(), "there is none yet"
        for batch in given[:3]:
            par.step(batch)
            assert par.save() == folder / f"step_{par.progress.steps}"
        expected = values(par)
        dist.barrier()
        # Leftovers of a killed save must not be regarded as checkpoints.
        (folder / ".step_9.saving-01234567").mkdir(exist_ok=True)
        (folder / "step_10").mkdir(exist_ok=True)
        other, _ = started(CASES["mlp"], FullyShard(), seed=6)
        assert other.load()
        assert other.progress.steps == 3
        assert_same(values(other), expected)
    finally:
        del os.environ["PACELINE_CHECKPOINT_DIR"]
    with pytest.raises(ParallelError, match="PACELINE_CHECKPOINT_DIR names, and it is not set"):
        par.save()


def check_asynchronous_save_stores_the_state_at_the_time_of_the_call(ranks: Any) -> None:
    # The training steps change both kinds of values in place: tensors of a single stage, and parts of tensors.
    for strategy in ranks.cells((FullyShard(), PipelineParallel()), STRATEGIES):
        par, given = started(SHALLOW["transformer_tied"], strategy)
        par.step(given[0])
        moment = values(par)
        par.save(ranks.folder / "moment", asynchronous=True)
        for batch in given[1:3]:
            par.step(batch)
        # This save waits until the first save is complete.
        par.save(ranks.folder / "later", asynchronous=True)
        later = values(par)
        par.step(given[3])
        par.load(ranks.folder / "moment")
        assert_same(values(par), moment)
        assert par.progress.steps == 1
        par.load(ranks.folder / "later")
        assert_same(values(par), later)
        awaited = ranks.folder / f"awaited_{type(strategy).__name__}"
        par.save(awaited, asynchronous=True)
        par.wait()
        assert awaited.is_dir()


@contextlib.contextmanager
def full_disk(on: bool) -> Iterator[None]:
    """On this rank, writing a part of a checkpoint fails."""

    def fail(path: Path, *given: Any) -> Any:
        (path.parent / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if on:
            patch.setattr(folders, "write_file", fail)
            patch.setattr(folders, "write_image", fail)
        yield


def check_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_previous_checkpoint(ranks: Any) -> None:
    par, given = started(CASES["mlp"], DataParallel())
    path = ranks.folder / "kept"
    par.step(given[0])
    par.save(path)
    expected = values(par)
    par.step(given[1])
    for bad in range(ranks.size):
        with full_disk(ranks.rank == bad), pytest.raises(CheckpointError, match=f"rank {bad}: No space left"):
            par.save(path)
    with full_disk(ranks.rank == 1):
        par.save(path, asynchronous=True)
        with pytest.raises(CheckpointError, match="No space left"):
            par.wait()
        # With `every` or in the background, a failed save does not stop the training.
        for _ in range(2):
            assert par.save(path, every=1) == path
        assert par.save(path, every=1, asynchronous=False) is None
    par.wait()
    dist.barrier()
    assert os.listdir(ranks.folder) == ["kept"]
    par.step(given[2])
    par.load(path)
    assert_same(values(par), expected)


def check_loading_a_damaged_checkpoint_raises_and_changes_nothing(ranks: Any) -> None:
    par, given = started(CASES["mlp"], DataParallel())
    par.step(given[0])
    par.save(ranks.folder / "cut")
    dist.barrier()
    if ranks.rank == 0:
        for part in (ranks.folder / "cut").glob("part_*"):
            with open(part, "r+b") as file:
                file.truncate(100)
    dist.barrier()
    other, given = started(CASES["mlp"], FullyShard(), seed=6)
    before = values(other)
    with pytest.raises(CheckpointError, match=r"Nothing was changed"):
        other.load(ranks.folder / "cut")
    assert_same(values(other), before)
    other.step(given[0])


def check_checkpoints_in_torch_distributed_format_are_read(ranks: Any) -> None:
    """Earlier versions wrote them."""
    import torch.distributed.checkpoint as dcp

    from paceline.parallel.checkpoint.folder import RECORD
    from paceline.parallel.checkpoint.state import tensors
    from paceline.parallel.checkpoint.store import hold

    par, given = started(CASES["mlp"], FullyShard())
    par.step(given[0])
    expected = values(par)
    par.save(ranks.folder / "new")
    dcp.save(tensors(hold(par)), checkpoint_id=ranks.folder / "old")
    if ranks.rank == 0:
        record = torch.load(ranks.folder / "new" / RECORD, weights_only=True)
        torch.save(record | {"format": 1}, ranks.folder / "old" / RECORD)
    dist.barrier()
    other, _ = started(CASES["mlp"], DataParallel(), seed=6)
    assert other.load(ranks.folder / "old")
    assert_same(values(other), expected)
    assert other.progress.steps == 1
