"""Every check of `checks/`, on the worlds that it is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.world import checks_of, modules

CHECKS = [
    (size, f"{module}.{check}") for module in modules() for check, sizes in checks_of(module).items() for size in sizes
]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("size", "check"), CHECKS, ids=[f"{check}-{size}" for size, check in CHECKS])
def test_on_ranks(size: int, check: str, outcome: Callable[[int, str], None]) -> None:
    outcome(size, check)
