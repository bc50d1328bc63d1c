"""Every check of `checks/` that is for a Keras: Keras 3 on TensorFlow and on torch, and tf_keras."""

from __future__ import annotations

import pytest

from tests.compat.horovod.keras.conftest import checks

#: Three ranks where a process starts soonest: on torch.
PLACES = [("keras-tensorflow", 2), ("keras-torch", 1), ("keras-torch", 3), ("tf_keras", 2)]
#: What is the same code with TensorFlow as with torch, where TensorFlow compiles a graph for seconds.
_AS_WITH_TORCH = {
    *("training.check_digits_equal_one_process_with_adam", "training.check_digits_in_three_passes_equal_one"),
    *("training.check_a_tied_transformer_equals_one_process", "training.check_a_schedule_goes_on_by_steps"),
    "training.check_a_tied_transformer_in_three_passes_equals_one",
    "training.check_groups_predivide_and_compression_leave_the_average",
    "training.check_weight_decay_and_moving_averages_are_the_optimizers_own",
}


# The first of a world waits for all of it.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "ranks", "check"),
    [
        pytest.param(
            kind, ranks, check, marks=[pytest.mark.proof] if kind != "keras-torch" and check in _AS_WITH_TORCH else []
        )
        for kind, ranks in PLACES
        for check in checks(kind)
    ],
)
def test_it_holds_on_every_rank(outcome, kind, ranks, check):
    outcome(kind, ranks, check)
