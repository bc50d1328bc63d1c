"""Every check of `checks/`, in a world of one without a launcher and on 3 ranks; on 2 and 4 what looks at the number."""

from __future__ import annotations

import pytest

from tests.compat.horovod.conftest import MODULES, every_check


# The first of a world waits for all of it.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        # What looks at the number of ranks is seen on two; four are twice as much of it.
        pytest.param(ranks, check, marks=[pytest.mark.proof] if ranks == 4 else [])
        for ranks, modules in MODULES.items()
        for check in every_check(modules)
    ],
)
def test_it_holds_on_every_rank(outcome, ranks, check):
    outcome(ranks, check)
