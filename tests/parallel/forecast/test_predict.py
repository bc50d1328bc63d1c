"""Forecasts are what their formulas say, by hand."""

from __future__ import annotations

import pytest

from paceline.parallel.forecast.predict import Measured, all_forecasts, candidates, forecast, name_of_layout, table
from paceline.parallel.pipeline.cut import Block
from paceline.parallel.strategy import ContextParallel, DataParallel, FullyShard, PipelineParallel, resolve

MIB = 2**20


def measured(**changed: object) -> Measured:
    """Four blocks of 4 MiB that take 10 and 20 ms for 8 rows, 4 and 8 for 2."""

    def blocks(forward_s: float) -> tuple[Block, ...]:
        return tuple(
            Block(
                name=str(index),
                forward_s=forward_s,
                backward_s=2 * forward_s,
                parameters=((str(index), 4 * MIB),),
                activation_bytes=8 * MIB,
                live_bytes=MIB,
            )
            for index in range(4)
        )

    given: dict[str, object] = {
        "rows": 8,
        "all_rows": 8,
        "blocks": blocks(0.01),
        "small_rows": 2,
        "small": blocks(0.004),
        "unit_bytes": 4 * MIB,
        "optimizer_s_a_byte": 1e-9,
        "bandwidth_bytes_s": 1e9,
    }
    return Measured(**(given | changed))  # type: ignore[arg-type]


@pytest.mark.promise("auto-takes-fastest-layout-fits")
def test_forecast_memory_and_step_time_equal_values_computed_by_hand() -> None:
    data = forecast(measured(), resolve(DataParallel(2), 2), 4, 4)
    # The times are measured for 2 rows (4 ms) and 8 rows (10 ms). The time for four rows is on the line between them.
    assert data.parameter_bytes == data.gradient_bytes == 16 * MIB
    assert data.optimizer_bytes == 32 * MIB
    assert data.activation_bytes == 16 * MIB
    assert data.sent_bytes == 16 * MIB
    assert data.step_s == pytest.approx(4 * 4 * 3 * 0.006 + 16 * MIB / 1e9 + 16 * MIB * 1e-9)
    shard = forecast(measured(), resolve(FullyShard(2), 2), 4, 4)
    assert shard.parameter_bytes == 8 * MIB
    assert shard.together_bytes == 22 * MIB
    assert shard.sent_bytes == 3 * 4 * 8 * MIB
    pipe = forecast(measured(), resolve(PipelineParallel(2), 2), 4, 4)
    assert pipe.parameter_bytes == 8 * MIB
    assert pipe.activation_bytes == 2 * 16 * MIB
    # Four microbatches take five slots in a 1F1B pipeline of two stages: the fifth slot is the bubble.
    assert pipe.step_s == pytest.approx(5 * 2 * 0.03 + 4 * MIB / 1e9 + 8 * MIB * 1e-9)
    assert pipe.bubble == pytest.approx(0.2)
    # With two groups of microbatches, each group has its own bubble, so the step takes longer.
    groups = forecast(measured(), resolve(PipelineParallel(2), 2), 4, 2)
    assert groups.step_s > pipe.step_s


def test_layout_that_cannot_run_is_forecast_with_the_reason() -> None:
    layout = resolve(PipelineParallel(2), 2)
    assert forecast(measured(), layout, 1, 1).reason == "microbatches=2 or more for 2 stages"
    assert forecast(measured(reason="it has no batch"), layout, 4, 4).reason == "it has no batch"
    eight = resolve(PipelineParallel(8), 8)
    assert forecast(measured(), eight, 8, 8).reason == "the model has 4 blocks to cut between"


@pytest.mark.parametrize(
    ("strategy", "workers", "name"),
    [
        (
            DataParallel(2) @ FullyShard(2) @ ContextParallel(2),
            8,
            "DataParallel(2) @ FullyShard(2) @ ContextParallel(2)",
        ),
        (DataParallel(2) @ FullyShard(2), 4, "DataParallel(2) @ FullyShard(2)"),
        (ContextParallel(2), 2, "ContextParallel(2)"),
        (FullyShard(), 1, "DataParallel(1)"),
    ],
)
def test_forecasts_include_the_current_layout(strategy: object, workers: int, name: str) -> None:
    """`explain` raised for layouts with three strategies, and its table had no row for others."""
    used = resolve(strategy, workers)
    found = all_forecasts(measured(), workers, 4, 4, used)
    assert name_of_layout(used) == name
    assert sum(line.startswith("* ") for line in table([one for _, one in found.values()], None, name)) == 1


def test_forecast_of_the_current_layout_uses_its_settings() -> None:
    used = resolve(PipelineParallel(2, schedule="interleaved", chunks=2), 2)
    found = all_forecasts(measured(), 2, 4, 4, used)["PipelineParallel(2)"][1]
    assert found == forecast(measured(), used, 4, 4, "PipelineParallel(2)")
    assert found.bubble < all_forecasts(measured(), 2, 4, 4)["PipelineParallel(2)"][1].bubble


def test_each_layout_of_a_worker_count_is_forecast_once() -> None:
    names = [name_of_layout(resolve(strategy, 4)) for strategy in candidates(4)]
    assert len(names) == len(set(names)) == 8
    found = all_forecasts(measured(), 4, 4, 4)
    assert list(found) == names
    lines = table([one for _, one in found.values()], 60 * MIB, "FullyShard(4)")
    assert len(lines) == 9
    assert sum(line.startswith("* ") for line in lines) == 1
    # A `-` marks a layout that does not fit into the memory: DataParallel(4) needs 64 MiB of states on each worker.
    assert next(line for line in lines if " DataParallel(4) " in line).startswith("- ")
