"""Every check of `checks/`, in a world of one without a launcher, and on 2, 3 and 4 ranks."""

from __future__ import annotations

import pytest

from tests.compat.horovod.conftest import CHECKS


# The first of a world waits for all of it.
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_holds_on_every_rank(outcome, ranks, check):
    outcome(ranks, check)
