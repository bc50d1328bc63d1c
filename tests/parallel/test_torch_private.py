"""What is used of torch without being public: one of these fails where a release of torch has moved it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.overrides import TorchFunctionMode

from paceline.parallel import torch_private
from paceline.parallel.pipeline.stages import ReplayStage


@pytest.mark.parametrize("name", torch_private.__all__)
def test_the_name_is_there(name: str) -> None:
    assert hasattr(torch_private, name)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_schedules_run_microbatches_that_are_cut_already(kind: str) -> None:
    run = getattr(pipelining, kind)._step_microbatches
    assert list(inspect.signature(run).parameters)[1:6] == [
        *("arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs")
    ]


@pytest.mark.parametrize(
    "name", [name for name in vars(ReplayStage) if not name.startswith("__") and name != "begin" and "_abc" not in name]
)
def test_every_method_of_our_stage_takes_the_place_of_one_of_torchs(name: str) -> None:
    ours, theirs = getattr(ReplayStage, name), getattr(PipelineStage, name)
    assert callable(ours)
    named = [parameter for parameter in inspect.signature(ours).parameters if parameter not in ("args", "kwargs")]
    assert named == [own for own in inspect.signature(theirs).parameters if own in named]


def test_a_tensors_values_are_asked_for_in_ways_that_a_mode_sees() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:  # type: ignore[type-arg]
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    one = torch.ones(())
    with Watch():
        bool(one), float(one), int(one), one.item(), one.tolist(), one.numpy(), torch.arange(2)
    assert {"__bool__", "__float__", "__int__", "item", "tolist", "numpy", "arange"} <= set(seen)


def test_a_change_in_place_is_seen_in_the_version_of_every_view() -> None:
    with torch_private.FakeTensorMode():
        whole = torch.zeros(4)
        view = whole[1:]
        before = view._version
        nn.ReLU(inplace=True)(whole)
        assert view._version == before + 1
        assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
        with pytest.raises(torch_private.VALUE_NEEDED):
            bool(whole.sum() > 0)
