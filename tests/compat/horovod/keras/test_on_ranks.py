"""Every check of `checks/` that is for a Keras: Keras 3 on TensorFlow and on torch, and tf_keras."""

from __future__ import annotations

import pytest

from tests.compat.horovod.keras.conftest import checks

#: Three ranks where a process starts soonest: on torch.
PLACES = [("keras-tensorflow", 2), ("keras-torch", 1), ("keras-torch", 3), ("tf_keras", 2)]


# The first of a world waits for all of it.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "ranks", "check"), [(kind, ranks, check) for kind, ranks in PLACES for check in checks(kind)]
)
def test_it_holds_on_every_rank(outcome, kind, ranks, check):
    outcome(kind, ranks, check)
