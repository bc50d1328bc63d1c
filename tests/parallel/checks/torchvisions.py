"""Models of torchvision on every layout of two workers; see `kinds`. All of it is in `make proof`, which installs torchvision."""

from __future__ import annotations

from tests.parallel.checks.kinds import assert_right
from tests.parallel.kinds.torchvisions import TORCHVISION
from tests.parallel.world import Ranks

SIZES = (2,)


def check_torchvision_models_equal_one_process_or_are_refused(ranks: Ranks) -> None:
    assert_right(ranks, TORCHVISION, dict.fromkeys(("data", "shard", "pipe", "tensor"), tuple(TORCHVISION)))
