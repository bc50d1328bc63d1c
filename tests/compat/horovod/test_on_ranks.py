"""Every check of `checks/`, in a world of one rank without a launcher and on 3 ranks; on 2 and 4 if the number matters."""

from __future__ import annotations

import pytest

from tests.compat.horovod.conftest import MODULES, every_check, is_repeated


# All checks on the same number of ranks run together, and the first of these tests waits for all of them.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        # `make test` leaves out four ranks, because two ranks show what depends on the number of ranks. It runs the
        # training checks only on two ranks (test_on_gloo.py), because three ranks take five times as long on two cores.
        pytest.param(ranks, check, marks=[pytest.mark.proof] if is_repeated(ranks, check) else [])
        for ranks, modules in MODULES.items()
        for check in every_check(modules)
    ],
)
def test_horovod_compatibility_check_passes_on_every_rank(outcome, ranks, check):
    outcome(ranks, check)
