"""Every check of `checks/`, in a world of one without a launcher, and on 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.compat.horovod.tensorflow.conftest import LEGACY_MODULES, MODULES, every_check
from tests.engines.conftest import require_module

#: Checks that `make test` leaves out. Other checks train a model with an embedding or with convolutions, by a tape and
#: with the same numbers of passes.
_AS_OTHERS = {
    "training.check_transformer_with_tied_embedding_equals_one_process_by_tape_and_in_three_passes",
    "training.check_digits_cnn_training_with_two_backward_passes_equals_one_process",
}
#: Modules that `make test` leaves out on one rank, because their graphs are the same as on two ranks.
_AS_ON_TWO = ("semantics.", "graphs.", "gradients.", "reduction.")


def _is_repeated(ranks: int, check: str) -> bool:
    """True if the code that this runs is run by a check that stays."""
    # On three ranks, the checks with torch cover the engine. On one rank, nothing is sent.
    return ranks == 3 or check in _AS_OTHERS or (ranks == 1 and check.startswith(_AS_ON_TWO))


# All checks on the same number of ranks run together, and the first of these tests waits for all of them.
@pytest.mark.promise("training-several-ranks-equals-one")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        pytest.param(ranks, check, marks=[pytest.mark.proof] if _is_repeated(ranks, check) else [])
        for ranks, modules in MODULES.items()
        for check in every_check(modules)
    ],
)
def test_tensorflow_compatibility_check_passes_on_every_rank(outcome, ranks, check):
    require_module("tensorflow")
    outcome(ranks, check)


@pytest.mark.proof
@pytest.mark.parametrize("check", every_check(LEGACY_MODULES))
def test_tensorflow_compatibility_check_passes_with_tf_keras(outcome, check):
    require_module("tf_keras")
    require_module("tensorflow")
    outcome(2, check, legacy=True)
