"""Every check of `checks/`, in a world of one without a launcher, and on 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.compat.horovod.tensorflow.conftest import LEGACY_MODULES, MODULES, every_check
from tests.engines.conftest import require_module

#: Other checks, with the embedding or with convolutions, cover each number of passes and the tape.
_AS_OTHERS = {
    "training.check_transformer_with_tied_embedding_equals_one_process_by_tape_and_in_three_passes",
    "training.check_digits_cnn_training_with_two_backward_passes_equals_one_process",
}
#: Checks whose graphs are the same on one rank and on two.
_AS_ON_TWO = ("semantics.", "graphs.", "gradients.", "reduction.")


def _is_repeated(ranks: int, check: str) -> bool:
    """True if the code that this runs is run by a check that stays."""
    # torch covers what three ranks show about the engine. One rank sends nothing, and its graphs equal those of two ranks.
    return ranks == 3 or check in _AS_OTHERS or (ranks == 1 and check.startswith(_AS_ON_TWO))


# The first test of a world of ranks waits until all checks of this world have run.
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
