"""The distance of two tensors, also with infinite numbers and NaN."""

from __future__ import annotations

import pytest

from tests.engines.conftest import require_module
from tests.late import late

torch, distance = late("torch"), late("paceline.parallel.tensor.check")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    require_module("torch")


def test_comparison_tolerance_ignores_infinite_and_nan_values() -> None:
    """Regression: the tolerance was relative to the largest value. A mask with one -inf made it infinite, so every
    difference passed as rounding."""
    scale_of = distance.scale_of
    assert scale_of(torch.tensor([-3.0, 2.0])) == 3.0
    assert scale_of(torch.tensor([float("-inf"), 2.0, float("nan")])) == 2.0
    assert scale_of(torch.tensor([float("nan")])) == scale_of(torch.zeros(0)) == 0.0
    assert scale_of(torch.tensor([1.0, -4.0], dtype=torch.bfloat16)) == 4.0


def test_nan_equals_only_nan_and_infinity_only_itself_within_tolerance() -> None:
    within, nan, inf = distance.within, float("nan"), float("inf")
    x = torch.tensor([1.0, 2.0])
    assert within(x, x + 0.5, 0.5)
    assert not within(x, x + 0.6, 0.5)
    assert not within(x, x - 0.6, 0.5)
    assert within(torch.tensor([nan, inf]), torch.tensor([nan, inf]), 0.1)
    assert not within(torch.tensor([nan, 1.0]), torch.tensor([1.0, nan]), 0.1)
    assert not within(torch.tensor([inf]), torch.tensor([-inf]), 0.1)
    assert not within(torch.tensor([1.0]), torch.tensor([nan]), 0.1)
    assert within(torch.zeros(0), torch.zeros(0), 0.0)
