"""The error if a stage can't run the backward pass through a block."""

from __future__ import annotations

import pytest

from paceline.parallel import ParallelError
from tests.late import late

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global _explained
    from paceline.parallel.pipeline.stages import _explained


def test_backward_error_by_an_in_place_change_of_a_saved_tensor_names_the_pipeline_stage() -> None:
    x, slow = torch.ones(2, 3, requires_grad=True), torch.ones(3, 3)
    losses = []
    # As in 1F1B, two microbatches run forward before the first one runs backward.
    for _ in range(2):
        slow.mul_(0.9)
        losses.append((x @ slow).sum())
    with (
        pytest.raises(
            ParallelError, match=r"a block of stage 1 changes a parameter or a buffer.*after step\(\)"
        ) as told,
        _explained(1),
    ):
        losses[0].backward()
    assert "\n" not in str(told.value)


def test_backward_error_not_caused_by_an_in_place_change_passes_unchanged() -> None:
    with pytest.raises(RuntimeError, match="does not require grad") as told, _explained(0):
        torch.ones(1).backward()
    assert not isinstance(told.value, ParallelError)
