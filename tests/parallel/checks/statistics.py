"""Running statistics, compared by the scale of the values that they are computed from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError
from tests.parallel.world import Ranks

SIZES = (2,)
REPLICAS = (DataParallel(), FullyShard())


class Bottleneck(nn.Module):
    """A normalisation without activation, then a convolution without bias: the next running mean is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first, self.up, self.second = nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu6(self.second(self.up(self.first(self.start(x))))).mean((2, 3)))


class Drifting(Bottleneck):
    """Keeps a mean of each replica's own rows in the buffer of a normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            # Replace the tensor, because autograd has saved the old one and refuses a change in place.
            self.second.running_mean = self.second.running_mean + x.mean() * 1e-3
        return y


def _step(kind: type[nn.Module], strategy: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    model = kind().to(dtype)
    torch.manual_seed(4)
    batch = torch.randn(8, 3, 6, 6, dtype=dtype), torch.randint(0, 5, (8,))
    par = paceline.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [batch], loss=F.cross_entropy, strategy=strategy
    )
    par.step(batch)
    return par


def check_running_mean_of_zero_with_rounding_errors_compares_equal(ranks: Ranks) -> None:
    """Regression: the tolerance was relative to the running mean. For a mean of zero no rounding error was allowed, so
    mobilenet_v2 and efficientnet were refused."""
    for dtype in (torch.float32, torch.float64):
        for strategy in REPLICAS:
            par = _step(Bottleneck, strategy, dtype)
            assert "equal to the plain model" in par.compared, par.compared


def check_a_small_error_in_a_running_mean_near_0_is_refused(ranks: Ranks) -> None:
    for strategy in REPLICAS:
        with pytest.raises(ParallelError, match=r"buffers are not those of the plain model.*second\.running_mean"):
            _step(Drifting, strategy, torch.float64)
