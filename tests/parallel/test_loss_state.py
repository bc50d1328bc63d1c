"""What a loss keeps between its calls is found and put back."""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.late import late

torch, nn, np = late("torch"), late("torch.nn"), late("numpy")
loss_state = late("paceline.parallel.loss_state")

KEPT: dict[str, Any] = {"calls": 0}


class Slow:
    """A proxy that fails on every access."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("outside of its context")


class Loss:
    unused = 0

    def __init__(self) -> None:
        self.calls, self.seen, self.kinds, self.last = 0, [1.0], Counter(a=1), deque([1, 2], maxlen=3)
        self.mean, self.table = torch.ones(3), np.ones(3)
        self.inner, self.space, self.proxy = {"sums": {1, 2}}, types.SimpleNamespace(n=0), Slow()

    def __call__(self, output: Any, target: Any) -> None:
        self.calls += 1
        self.new = 1
        self.seen.append(2.0)
        self.kinds["b"] += 1
        self.last.append(3)
        self.mean.lerp_(torch.zeros(3), 0.5)
        self.table *= 2
        self.inner["sums"].add(3)
        self.space.n += 1


def _in_object() -> tuple[Callable[..., Any], Callable[[], Any]]:
    loss = Loss()
    return loss, lambda: repr({name: value for name, value in vars(loss).items() if name != "proxy"})


def _in_method() -> tuple[Callable[..., Any], Callable[[], Any]]:
    loss, shown = _in_object()
    return loss.__call__, shown


def _in_closure() -> tuple[Callable[..., Any], Callable[[], Any]]:
    calls, seen = 0, [0]

    def loss(output: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        seen.append(calls)

    return loss, lambda: (calls, list(seen))


def _in_helper() -> tuple[Callable[..., Any], Callable[[], Any]]:
    return functools.partial(_through), lambda: dict(KEPT)


def _through(output: Any, target: Any) -> None:
    _count()


def _count() -> None:
    KEPT["calls"] += 1


def _in_module() -> tuple[Callable[..., Any], Callable[[], Any]]:
    class Centred(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Any, target: Any) -> None:
            self.centre.sum().backward()
            with torch.no_grad():
                self.centre.mul_(2)
            self.seen = self.seen + 1

    loss = Centred()
    return loss, lambda: (loss.centre.tolist(), loss.centre.grad, float(loss.seen))


@pytest.mark.parametrize("kind", ["object", "method", "closure", "helper", "module"])
def test_state_changed_by_a_loss_call_is_restored_in_objects_closures_helpers_and_modules(kind: str) -> None:
    makers = {
        "object": _in_object,
        "method": _in_method,
        "closure": _in_closure,
        "helper": _in_helper,
        "module": _in_module,
    }
    loss, shown = makers[kind]()
    loss(None, None)
    if kind == "module":
        nn.Module.zero_grad(loss)  # type: ignore[attr-defined]
    before = shown()
    with loss_state.loss_kept(loss, nn.Linear(1, 1)):
        loss(None, None)
        assert shown() != before
    assert shown() == before


def test_tensors_that_a_loss_does_not_change_keep_their_version_when_its_state_is_restored() -> None:
    table = torch.ones(3)
    with loss_state.loss_kept(lambda output, target: (output * table).sum(), nn.Linear(1, 1)):
        pass
    assert table._version == 0


def test_frozen_teacher_of_a_loss_is_not_copied() -> None:
    teacher, model = nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 512)
    state = loss_state.LossState(lambda output, target: (teacher(output), model), nn.Sequential(model))
    assert sum(value.numel() for value in state.numbers.values() if isinstance(value, torch.Tensor)) == 512


def test_items_of_a_large_dict_used_by_a_loss_are_not_inspected_or_converted_to_text() -> None:
    class Key:
        def __str__(self) -> str:
            named.append(self)
            return "key"

    named: list[Key] = []
    for size in (1, loss_state.MANY + 1):
        table = {Key(): number for number in range(size)}
        with loss_state.loss_kept(functools.partial(print, table), nn.Linear(1, 1)) as state:
            table.clear()
        assert (len(table), len(named), len(state.numbers)) == (size, 1, size == 1)


def test_loss_state_lists_an_iterator_used_by_the_loss_function_by_the_name_of_its_variable() -> None:
    weights = iter([1.0])
    state = loss_state.LossState(lambda output, target: output * next(weights), nn.Linear(1, 1))
    assert [name.split(" of ")[0] for name in state.iterators] == ["weights"]


def test_fake_tensor_used_by_a_loss_function_is_left_out_of_the_saved_loss_state() -> None:
    """Regression: a hook stored an output for use in the loss function. Tracing the model replaced this output by a
    fake tensor, which has no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        seen = {"first": torch.zeros(3)}

    with loss_state.loss_kept(lambda output: output + seen["first"], nn.Linear(1, 1)) as state:
        pass

    assert not any("first" in name for name in state.numbers)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_context_manager_buffers_kept_restores_changed_buffers_of_a_torchscript_module() -> None:
    """Regression: a TorchScript module has no dictionary of buffers, so the comparison of the first step ended with an
    AttributeError."""
    from paceline.parallel.tracing.fake_model import buffers_kept

    part = torch.jit.script(nn.BatchNorm1d(2))

    with buffers_kept(nn.Sequential(part)):
        part.running_mean.fill_(7.0)

    assert part.running_mean.tolist() == [0.0, 0.0]
