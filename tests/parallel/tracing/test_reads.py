"""Records of the outer forward, in one process."""

from __future__ import annotations

import cProfile
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.late import late

if TYPE_CHECKING:
    from torch import nn

torch, models = late("torch"), late("tests.parallel.tracing.models")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Tracer
    from paceline.parallel.tracing.trace import Tracer


COLLECTIONS = 0


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


def test_finalizers_that_run_during_tracing_are_not_recorded() -> None:
    with _on_each_collection():
        traced = _tracer(models.Chain()).trace((torch.ones(2, 4),), {})
    assert [read.text for read in traced.reads.found.values()] == ["Chain.scale"]
    assert gc.isenabled()


def test_active_profiler_survives_tracing() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        before = sys.getprofile()
        _tracer(models.Chain()).trace((torch.ones(2, 4),), {})
        assert sys.getprofile() is before
    finally:
        profiler.disable()


def test_changed_model_attribute_retraces_the_model_without_running_its_blocks() -> None:
    model = models.Chain()
    tracer, x = _tracer(model), torch.ones(2, 4)
    first = tracer.trace((x,), {})
    calls, digest = models.Counted.calls, first.reads.digest
    model.scale = 0.5
    assert [read.text for read in first.reads.changed()] == ["Chain.scale"]
    second = tracer.trace((x,), {})
    assert models.Counted.calls == calls
    assert first.digest != second.digest
    assert digest != second.reads.digest
    # Setting an attribute of a block may change the block's output, so the model must run again.
    model.blocks[1].gain = 2.0
    tracer.trace((x,), {})
    assert models.Counted.calls > calls


def test_values_in_closures_are_tracked_after_gc_freeze() -> None:
    # Regression: after `gc.freeze()`, which programs call before they fork, a pipeline did not notice that a number in
    # a closure changes, and kept its value of the first step.
    model = models.scaled()
    gc.freeze()
    try:
        traced = _tracer(model).trace((torch.ones(2, 4),), {})
    finally:
        gc.unfreeze()
    assert any(read.text.startswith("factor of ") for read in traced.reads.found.values())
