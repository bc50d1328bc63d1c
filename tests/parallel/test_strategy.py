from __future__ import annotations

from typing import Any

import pytest

from paceline.parallel.errors import ParallelError
from paceline.parallel.strategy import Data, FullyShard, Pipeline, Strategy, Tensor, resolve
from tests.helpers import run_python


@pytest.mark.parametrize(
    ("strategy", "size", "sizes"),
    [
        (Data(), 1, (1, 1, 1, 1)),
        (Data(), 4, (4, 1, 1, 1)),
        (FullyShard(), 2, (1, 2, 1, 1)),
        (Pipeline(stages=4), 4, (1, 1, 4, 1)),
        (Tensor(), 2, (1, 1, 1, 2)),
        (Data(2) @ Pipeline(2), 4, (2, 1, 2, 1)),
        (Data() @ Pipeline(2), 8, (4, 1, 2, 1)),
        (FullyShard(2) @ Pipeline(2), 4, (1, 2, 2, 1)),
        (Data(2) @ FullyShard(2) @ Tensor(3) @ Pipeline(2), 24, (2, 2, 2, 3)),
        (Data(2) @ (Tensor(2) @ Pipeline(2)), 8, (2, 1, 2, 2)),
    ],
)
def test_sizes_multiply_to_the_world(strategy: Any, size: int, sizes: tuple[int, ...]) -> None:
    layout = resolve(strategy, size)
    assert (layout.data, layout.shard, layout.pipe, layout.tensor) == sizes
    assert layout.size == size


@pytest.mark.parametrize(
    ("strategy", "size", "words"),
    [
        (Data(3), 4, ["Data(3)", "data 3", "there are 4"]),
        (Data(2) @ Pipeline(2), 2, ["Data(2) @ Pipeline(2)", "needs 4 workers", "data 2 x pipe 2", "there are 2"]),
        (Pipeline(2), 1, ["needs 2 workers", "there is 1", "torchrun --nproc-per-node 2"]),
        (Data() @ Pipeline(2), 3, ["a multiple of 2", "data ? x pipe 2"]),
        (Data() @ Pipeline(), 4, ["leaves the sizes of data and pipe open"]),
        (Data(batch_norm="local") @ FullyShard(2), 2, ["batch_norm is local and sync"]),
        (Data, 2, ["write Data()"]),
        ("data", 2, ["'data'", "Data()", "'auto'"]),
        (None, 1, ["strategy=None"]),
    ],
)
def test_what_does_not_multiply_is_refused_with_the_product(strategy: Any, size: int, words: list[str]) -> None:
    with pytest.raises(ParallelError) as refused:
        resolve(strategy, size)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Data(0), "size=0"),
        (lambda: Data(True), "size=True"),
        (lambda: Data(batch_norm="global"), "'sync', 'local'"),
        (lambda: Pipeline(2, schedule="zigzag"), "'1f1b', 'gpipe', 'interleaved'"),
        (lambda: Pipeline(2, cut="blocks.2"), r"cut=\['blocks.6'\]"),
        (lambda: Pipeline(2, cut=["blocks.2", 3]), "3 is no name"),  # type: ignore[arg-type,list-item]
        (lambda: Tensor(plan={"*.up": "sideways"}), "colwise"),
        (lambda: Data(2) @ Data(2), "Data stands twice"),
        (lambda: Data(2) @ Pipeline(2) @ Pipeline(2), "Pipeline stands twice"),
        (lambda: FullyShard(units="blocks"), "units='blocks'"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_can_not_be_right_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises(ParallelError, match=words):
        make()


def test_a_strategy_is_joined_with_strategies_alone() -> None:
    with pytest.raises(TypeError):
        Data(2) @ 2  # type: ignore[operator]


def test_torch_s_own_tensor_is_told_from_the_strategy() -> None:
    torch = pytest.importorskip("torch")
    for write in (lambda: Data(2) @ torch.Tensor(2), lambda: resolve(torch.Tensor(2), 2)):
        with pytest.raises(ParallelError, match="torch's own here"):
            write()


def test_what_a_strategy_says_reaches_the_layout() -> None:
    layout = resolve(Data(2) @ Pipeline(2, schedule="interleaved", cut=["a", "b", "c"], chunks=2), 4)  # type: ignore[arg-type]
    assert (layout.schedule, layout.cut, layout.chunks) == ("interleaved", ("a", "b", "c"), 2)
    # Chunks are for the interleaved schedule alone.
    assert resolve(Pipeline(2, chunks=3), 2).chunks == 1
    assert resolve(Tensor(2, plan={"up": "colwise"}), 2).plan == {"up": "colwise"}
    assert resolve(FullyShard(units=["blocks.*"]), 2).units == ("blocks.*",)  # type: ignore[arg-type]
    assert str(layout) == "data 2 x pipe 2"


def test_equal_strategies_are_equal() -> None:
    assert Data(2) @ Pipeline(2) == Data(2) @ Pipeline(2)
    assert isinstance(Data(2) @ Pipeline(2), Strategy)
    assert len({Tensor(2, plan={"a": "colwise"}), Tensor(2, plan={"a": "colwise"})}) == 1


def test_a_strategy_is_written_down_without_torch() -> None:
    code = "import sys, paceline.parallel as p; p.Data(2) @ p.Pipeline(2); print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"
