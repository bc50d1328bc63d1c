from __future__ import annotations

from typing import Any

import pytest

from paceline.parallel.errors import ParallelError
from paceline.parallel.strategy import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    FullyShard,
    PipelineParallel,
    Strategy,
    TensorParallel,
    resolve,
)
from tests.helpers import run_python


@pytest.mark.parametrize(
    ("strategy", "size", "sizes"),
    [
        (DataParallel(), 1, (1, 1, 1, 1)),
        (DataParallel(), 4, (4, 1, 1, 1)),
        (FullyShard(), 2, (1, 2, 1, 1)),
        (PipelineParallel(stages=4), 4, (1, 1, 4, 1)),
        (TensorParallel(), 2, (1, 1, 1, 2)),
        (DataParallel(2) @ PipelineParallel(2), 4, (2, 1, 2, 1)),
        (DataParallel() @ PipelineParallel(2), 8, (4, 1, 2, 1)),
        (FullyShard(2) @ PipelineParallel(2), 4, (1, 2, 2, 1)),
        (DataParallel(2) @ FullyShard(2) @ TensorParallel(3) @ PipelineParallel(2), 24, (2, 2, 2, 3)),
        (DataParallel(2) @ (TensorParallel(2) @ PipelineParallel(2)), 8, (2, 1, 2, 2)),
    ],
)
def test_axis_sizes_of_a_resolved_strategy_multiply_to_the_world_size(
    strategy: Any, size: int, sizes: tuple[int, ...]
) -> None:
    layout = resolve(strategy, size)
    assert (layout.data, layout.shard, layout.pipe, layout.tensor) == sizes
    assert layout.size == size


@pytest.mark.parametrize(
    ("strategy", "size", "words"),
    [
        (DataParallel(3), 4, ["DataParallel(3)", "data 3", "there are 4"]),
        (
            DataParallel(2) @ PipelineParallel(2),
            2,
            ["DataParallel(2) @ PipelineParallel(2)", "needs 4 workers", "data 2 x pipe 2", "there are 2"],
        ),
        (PipelineParallel(2), 1, ["needs 2 workers", "there is 1", "torchrun --nproc-per-node 2"]),
        (DataParallel() @ PipelineParallel(2), 3, ["a multiple of 2", "data ? x pipe 2"]),
        (DataParallel() @ PipelineParallel(), 4, ["leaves the sizes of data and pipe open"]),
        (DataParallel(batch_norm="local") @ FullyShard(2), 2, ["batch_norm is local and sync"]),
        (ContextParallel(2) @ TensorParallel(2), 4, ["ContextParallel @ TensorParallel is not built", "FullyShard()"]),
        (
            FullyShard(2) @ ExpertParallel(2),
            4,
            ["ExpertParallel @ FullyShard is not built", "goes with DataParallel()"],
        ),
        (ContextParallel(3), 4, ["ContextParallel(3)", "context 3", "there are 4"]),
        (DataParallel, 2, ["write DataParallel()"]),
        ("data", 2, ["'data'", "DataParallel()", "'auto'"]),
        (None, 1, ["strategy=None"]),
    ],
)
def test_axis_sizes_must_multiply_to_the_world_size(strategy: Any, size: int, words: list[str]) -> None:
    with pytest.raises(ParallelError) as refused:
        resolve(strategy, size)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataParallel(0), "size=0"),
        (lambda: DataParallel(True), "size=True"),
        (lambda: DataParallel(batch_norm="global"), "'sync', 'local'"),
        (lambda: PipelineParallel(2, schedule="zigzag"), "'1f1b', 'gpipe', 'interleaved'"),
        (lambda: PipelineParallel(2, cut="blocks.2"), r"cut=\['blocks.6'\]"),
        (lambda: PipelineParallel(2, cut=["blocks.2", 3]), "3 is not a name"),  # type: ignore[arg-type,list-item]
        (lambda: TensorParallel(plan={"*.up": "sideways"}), "colwise"),
        (lambda: DataParallel(2) @ DataParallel(2), "DataParallel occurs twice"),
        (lambda: DataParallel(2) @ PipelineParallel(2) @ PipelineParallel(2), "PipelineParallel occurs twice"),
        (lambda: FullyShard(units="blocks"), "units='blocks'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_strategy_value_is_refused_in_its_constructor(make: Any, words: str) -> None:
    with pytest.raises(ParallelError, match=words):
        make()


def test_matmul_of_a_strategy_and_a_number_raises_type_error() -> None:
    with pytest.raises(TypeError):
        DataParallel(2) @ 2  # type: ignore[operator]


def test_resolved_layout_keeps_schedule_cut_chunks_plan_and_units_given_to_the_strategy() -> None:
    layout = resolve(DataParallel(2) @ PipelineParallel(2, schedule="interleaved", cut=["a", "b", "c"], chunks=2), 4)  # type: ignore[arg-type]
    assert (layout.schedule, layout.cut, layout.chunks) == ("interleaved", ("a", "b", "c"), 2)
    # Only the interleaved schedule uses chunks.
    assert resolve(PipelineParallel(2, chunks=3), 2).chunks == 1
    assert resolve(TensorParallel(2, plan={"up": "colwise"}), 2).plan == {"up": "colwise"}
    assert resolve(FullyShard(units=["blocks.*"]), 2).units == ("blocks.*",)  # type: ignore[arg-type]
    assert str(layout) == "data 2 x pipe 2"


def test_strategies_with_equal_arguments_compare_equal() -> None:
    assert DataParallel(2) @ PipelineParallel(2) == DataParallel(2) @ PipelineParallel(2)
    assert isinstance(DataParallel(2) @ PipelineParallel(2), Strategy)
    assert len({TensorParallel(2, plan={"a": "colwise"}), TensorParallel(2, plan={"a": "colwise"})}) == 1


def test_constructing_a_strategy_does_not_import_torch() -> None:
    code = (
        "import sys, paceline.parallel as p; p.DataParallel(2) @ p.PipelineParallel(2); print('torch' in sys.modules)"
    )
    assert run_python(code).strip() == "False"
