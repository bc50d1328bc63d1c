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
    *(
        "training.check_a_tied_transformer_in_three_passes_equals_one",
        "training.check_clipping_of_each_acts_on_the_average",
    ),
    "training.check_groups_predivide_and_compression_leave_the_average",
    "training.check_weight_decay_and_moving_averages_are_the_optimizers_own",
}

#: What both of the others run: Keras 3's own part with torch, the graphs of TensorFlow with tf_keras.
_AS_WITH_BOTH = {
    *("training.check_clipping_acts_on_the_average", "callbacks.check_all_callbacks_together_train"),
    *("callbacks.check_a_schedule_by_steps_by_function_and_by_fractions", "saving.check_a_class_of_the_scripts_own"),
    *("saving.check_weights_go_from_one_optimizer_to_another", "elastic.check_epochs_and_batches_are_counted_on"),
    *("saving.check_one_rank_may_load_what_the_others_build", "saving.check_a_file_is_read_without_horovod"),
    "callbacks.check_the_best_model_is_saved_by_the_first_rank_alone",
}


def _marks(kind: str, check: str) -> list[pytest.MarkDecorator]:
    less = {"keras-tensorflow": _AS_WITH_TORCH | _AS_WITH_BOTH, "tf_keras": _AS_WITH_TORCH}
    return [pytest.mark.proof] if check in less.get(kind, ()) else []


# The first of a world waits for all of it.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "ranks", "check"),
    [pytest.param(kind, ranks, check, marks=_marks(kind, check)) for kind, ranks in PLACES for check in checks(kind)],
)
def test_it_holds_on_every_rank(outcome, kind, ranks, check):
    outcome(kind, ranks, check)
