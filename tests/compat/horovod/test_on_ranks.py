"""Every check of `checks/`, in a world of one rank without a launcher and on 3 ranks; on 2 and 4 if the number matters."""

from __future__ import annotations

import pytest

from tests.compat.horovod.conftest import MODULES, every_check, is_repeated


# The first of a world waits for all of it.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        # What looks at the number of ranks is seen on two; four are twice as much of it. A training is made of collectives and an
        # optimizer, which have three ranks here, and is seen on two (test_on_gloo.py): three on two cores take five times as
        # long.
        pytest.param(ranks, check, marks=[pytest.mark.proof] if is_repeated(ranks, check) else [])
        for ranks, modules in MODULES.items()
        for check in every_check(modules)
    ],
)
def test_horovod_compatibility_check_passes_on_every_rank(outcome, ranks, check):
    outcome(ranks, check)
