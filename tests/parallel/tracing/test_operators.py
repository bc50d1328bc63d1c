"""Every operator and function of a tensor in an outer forward, from torch's own lists: equal, or refused with a reason."""

from __future__ import annotations

import inspect
import itertools
import sys
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from paceline.parallel import ParallelError
from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = late("torch.nn")

torch, parts = late("torch"), late("tests.parallel.tracing.parts")


def _model(call: Callable[..., Any]) -> nn.Module:
    """A model that calls this between two blocks."""
    from paceline.parallel.pytree import tensors_in

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor, *others: Tensor) -> list[Tensor]:
            return [self.b(value) for value in tensors_in(call(self.a(x), *others))]

    return Model()


def _outcome(call: Callable[..., Any], *inputs: Tensor) -> str:
    """What a pipeline makes of the call: "equal", "whole" (no place to cut), "refused" or how it is wrong; "" if torch can't."""
    from paceline.parallel.tracing.boundaries import Boundaries
    from paceline.parallel.tracing.segments import split

    def copies() -> list[Tensor]:
        torch.manual_seed(0)
        return [tensor.clone() for tensor in inputs]

    try:
        expected = _model(call)(*copies())
        # Call the model twice: the results differ if an operator returns memory that nothing was written to.
        torch.testing.assert_close(_model(call)(*copies()), expected, rtol=0, atol=0, equal_nan=True)
    except Exception:
        return ""
    if not expected:
        return ""
    try:
        model = _model(call)
        boundaries = Boundaries(parts.traced(model, *inputs))
        places = boundaries.marks()
        for _, place in places:
            found = parts.run(model, split(boundaries, [place]), copies(), {})
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    except ParallelError as error:
        return "refused" if "move that line into a module" in str(error) else f"refused without a next step: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal" if places else "whole"


def _operators() -> Iterator[str]:
    methods = torch.overrides.get_overridable_functions()[torch.Tensor]
    own = {id(method) for method in methods}
    for name in dir(torch.Tensor):
        if name.startswith("__") and id(getattr(torch.Tensor, name, None)) in own:
            yield name


@pytest.mark.promise("operator-tensor-outer-forward-pipeline")
def test_split_model_with_a_tensor_operator_outside_its_blocks_has_equal_output_or_is_refused() -> None:
    x = torch.rand(3, 3, dtype=torch.float64) + 0.5
    whole_numbers = torch.arange(1, 10).reshape(3, 3)
    outcomes = {}
    for name in _operators():
        for value, others in ((x, (2,)), (x, (x,)), (x, ()), (whole_numbers, (whole_numbers,)), (whole_numbers, ())):
            tensors = [other for other in others if isinstance(other, torch.Tensor)]
            numbers = [other for other in others if not isinstance(other, torch.Tensor)]

            def call(own: Tensor, *rest: Tensor, name: str = name, numbers: list[Any] = numbers) -> Any:
                # Add 0 to copy the tensor, because an in-place operator would change the batch.
                return getattr(torch.Tensor, name)(own + 0, *rest, *numbers)

            found = _outcome(call, value, *tensors)
            outcomes[name, str(value.dtype), str(others)] = found
            if found == "equal":
                break
    wrong = {key: found for key, found in outcomes.items() if found not in ("", "equal", "whole", "refused")}
    assert not wrong
    tried = {name for (name, *_), found in outcomes.items() if found == "equal"}
    assert tried >= {
        "__pow__",
        "__rpow__",
        "__ipow__",
        "__rsub__",
        "__matmul__",
        "__getitem__",
        "__floordiv__",
        "__mod__",
    }


def test_split_model_with_powers_outside_its_blocks_has_the_output_of_the_whole_model() -> None:
    x = torch.rand(3, 4, dtype=torch.float64) + 0.5
    for call in (lambda x: x**2, lambda x: 2**x, lambda x: x**x, lambda x: (x + 0).pow_(2), lambda x: torch.pow(x, 2)):
        assert _outcome(call, x) == "equal"


def test_split_model_with_a_weighted_l1_loss_outside_its_blocks_has_the_whole_models_output() -> None:
    """torch leaves it out where it hands the call to a mode."""
    functional = torch.nn.functional
    if "weight" not in inspect.signature(functional.l1_loss).parameters:
        pytest.skip("this torch's l1_loss has no weight")
    x, y, weight = (torch.rand(3, 4, dtype=torch.float64) for _ in range(3))
    assert _outcome(lambda *given: functional.l1_loss(given[0], given[1], weight=given[2]), x, y, weight) == "equal"


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200)
def test_split_model_with_any_torch_op_db_operation_outside_blocks_has_equal_output_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list with which torch tests itself: functions, methods, operators and their forms in place, with its own samples."""
    if "expecttest" not in sys.modules:
        # The module with torch's list imports expecttest, but the list does not use it.
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    operations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    # Set no seed in the forward, because only one of the stages would set it.
    monkeypatch.setattr(operations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    outcomes = {}
    for operation in operations.op_db:
        dtype = next((one for one in (torch.float32, torch.int64, torch.complex64) if one in operation.dtypes), None)
        if dtype is None or "empty" in operation.name:
            continue
        samples = list(itertools.islice(operation.sample_inputs("cpu", dtype, requires_grad=False), 1, 3))
        for form, (number, sample) in itertools.product(
            ("op", "method_variant", "operator_variant", "inplace_variant"), enumerate(samples)
        ):
            if (function := getattr(operation, form, None)) is not None:
                outcomes[operation.name, form, number] = _outcome(*_call(function, sample))
    wrong = {key: found for key, found in outcomes.items() if found not in ("", "equal", "whole", "refused")}
    assert not wrong, "\n".join(f"{key}: {found[:80]!r}" for key, found in wrong.items())
    assert list(outcomes.values()).count("equal") > 1000


def _call(function: Any, sample: Any) -> tuple[Callable[..., Any], ...]:
    """A function of the sample's tensors, and these."""
    from paceline.parallel.pytree import map_tensors, tensors_in

    given = (sample.input, sample.args, sample.kwargs)

    def call(*tensors: Tensor) -> Any:
        own = iter(tensors)
        first, args, kwargs = map_tensors(given, lambda _: next(own))
        return function(first, *args, **kwargs)

    return call, *tensors_in(given)
