"""A model and its parts side by side, in one process: every way to cut it, and what each gives. Imports torch."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.programs import opened_modules
from paceline.parallel.pytree import map_tensors, tensors_at, tensors_in
from paceline.parallel.tracing.boundaries import Boundaries, Mark
from paceline.parallel.tracing.segments import Segment, split, stage_module
from paceline.parallel.tracing.trace import Traced, Tracer


def traced(model: nn.Module, *args: Any, level: int = 0, cut: tuple[str, ...] = (), **kwargs: Any) -> Traced:
    """What the tracer finds for these arguments."""
    return Tracer(model, opened_modules(model, level=level, cut=cut).__contains__).trace(args, kwargs)


def marks(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Where the model may be cut."""
    return [str(mark) for mark, _ in Boundaries(traced(model, *args, **kwargs)).marks()]


def run(model: nn.Module, segments: tuple[Segment, ...], args: Any, kwargs: Any) -> Any:
    """The output of the parts, one after the other; each on what the one before sent, cut off from its history.

    The gradients go back the same way when `backward` of the result's tensors is called: as if by messages.
    """
    batch = tensors_in((args, kwargs))
    values: Any = ()
    for segment in segments:
        stage = stage_module(model, segment.uses, nn.Module)
        received = [_Message.apply(value) if value.is_floating_point() else value for value in values]
        for tensor, announced in zip(received, segment.receives, strict=True):
            assert tuple(tensor.shape) == announced.shape
            assert tensor.dtype == announced.dtype
            assert tensor.requires_grad == announced.requires_grad or not torch.is_grad_enabled()
        values = segment(stage, received, batch)
    return values


class _Message(torch.autograd.Function):
    """Another tensor with the same content, as a receive buffer would be."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def assert_parts_equal_whole(
    model: nn.Module, *args: Any, stages: tuple[int, ...] = (2, 3), level: int = 0, **kwargs: Any
) -> list[str]:
    """Cut everywhere, in training: output, gradients, buffers and random numbers are the whole model's, to the last bit.

    The names of the places at which it was cut.
    """
    whole = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = whole(*map_tensors(args, torch.clone), **map_tensors(kwargs, torch.clone))
    _backward(expected)
    found = traced(model, *args, level=level, **kwargs)
    boundaries = Boundaries(found)
    places = boundaries.marks()
    tried = 0
    for count in stages:
        for chosen in combinations(places, count - 1):
            parts = copy.deepcopy(model)
            segments = split(boundaries, [place for _, place in chosen])
            torch.manual_seed(3)
            actual = run(parts, segments, map_tensors(args, torch.clone), map_tensors(kwargs, torch.clone))
            _backward(actual)
            assert_same(expected, actual)
            for (name, param), (_, other) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
                same = param.grad is None and other.grad is None
                assert same or torch.equal(param.grad, other.grad), (
                    f"{name}, cut at {[str(mark) for mark, _ in chosen]}"
                )
            for (name, buffer), (_, other) in zip(whole.named_buffers(), parts.named_buffers(), strict=True):
                assert torch.equal(buffer, other), name
            tried += 1
    assert tried, "it can't be cut anywhere"
    return [str(mark) for mark, _ in places]


def assert_same(expected: Any, actual: Any) -> None:
    """The same containers, and the same tensors to the last bit."""
    assert type(expected) is type(actual)
    left, right = list(tensors_at(expected)), list(tensors_at(actual))
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, one), (_, other) in zip(left, right, strict=True):
        assert torch.equal(one, other), path


def mark(name: str, nth: int = 0) -> Mark:
    return Mark(name=name, nth=nth)


def _backward(value: Any) -> None:
    tensors = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    torch.autograd.backward([tensor.square().sum() for tensor in tensors])
