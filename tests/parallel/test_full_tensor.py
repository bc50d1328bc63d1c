"""Tensors put together from their parts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from paceline.parallel.full_tensor import whole
from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor

torch = late("torch")


class InParts:
    """As a DTensor whose parts take two messages to put together, which torch logs."""

    def full_tensor(self) -> Tensor:
        logging.getLogger("torch.distributed.tensor._redistribute").warning("2 sequential all_gather operations")
        return torch.ones(2)


def test_full_tensor_is_gathered_without_torch_warnings(caplog: pytest.LogCaptureFixture) -> None:
    # Regression: at the end of every training with FullyShard(2) @ TensorParallel(2), each rank printed a torch warning
    # of 600 characters.
    assert torch.equal(whole(InParts()), torch.ones(2))
    assert caplog.records == []
    InParts().full_tensor()
    assert len(caplog.records) == 1, "and torch may speak again afterwards"


def test_tensor_that_is_not_sharded_is_returned_as_the_same_object() -> None:
    tensor = torch.ones(3)
    assert whole(tensor) is tensor
    assert whole(None) is None
