"""What is noted of the outer forward, in one process."""

from __future__ import annotations

import cProfile
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.parallel.tracing.trace import Tracer

COLLECTIONS = 0


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted() for _ in range(3)])
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
            # Enough objects in cycles to start the garbage collector, were it on.
            for _ in range(2000):
                cycle: list[object] = []
                cycle.append(cycle)
        return x


class Counted(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return self.inner(x) * self.gain


def _tracer(model: nn.Module) -> Tracer:
    return Tracer(model, lambda name: name == "blocks")


@contextmanager
def _on_each_collection() -> Iterator[None]:
    def count(phase: str, _: object) -> None:
        global COLLECTIONS
        COLLECTIONS += 1

    gc.callbacks.append(count)
    try:
        yield
    finally:
        gc.callbacks.remove(count)


def test_what_the_garbage_collector_calls_is_no_part_of_the_forward() -> None:
    with _on_each_collection():
        traced = _tracer(Chain()).trace((torch.ones(2, 4),), {})
    assert [read.text for read in traced.reads.found.values()] == ["Chain.scale"]
    assert gc.isenabled()


def test_a_profiler_goes_on() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        before = sys.getprofile()
        _tracer(Chain()).trace((torch.ones(2, 4),), {})
        assert sys.getprofile() is before
    finally:
        profiler.disable()


def test_a_number_that_changes_runs_no_block_again() -> None:
    model = Chain()
    tracer, x = _tracer(model), torch.ones(2, 4)
    first = tracer.trace((x,), {})
    calls, digest = Counted.calls, first.reads.digest
    model.scale = 0.5
    assert [read.text for read in first.reads.changed()] == ["Chain.scale"]
    second = tracer.trace((x,), {})
    assert Counted.calls == calls
    assert first.digest != second.digest
    assert digest != second.reads.digest
    # What is set on a block itself may change what it gives.
    model.blocks[1].gain = 2.0
    tracer.trace((x,), {})
    assert Counted.calls > calls
