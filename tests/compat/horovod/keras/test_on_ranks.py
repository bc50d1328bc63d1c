"""Every check of `checks/` that is for a Keras: Keras 3 on TensorFlow and on torch, and tf_keras."""

from __future__ import annotations

import pytest

from tests.compat.horovod.keras.conftest import checks

#: Three ranks where a process starts soonest: on torch.
PLACES = [("keras-tensorflow", 2), ("keras-torch", 1), ("keras-torch", 3), ("tf_keras", 2)]
#: What is the same code with TensorFlow as with torch, where TensorFlow compiles a graph for seconds. The checks `graphs` have
#: the digits and the rows of an embedding in one pass and in two, `tensorflow/test_on_ranks.py` has the tied embedding.
_AS_WITH_TORCH = {
    *("training.check_digits_equal_one_process", "training.check_digits_in_two_passes_equal_one"),
    "training.check_a_tied_transformer_in_two_passes_equals_one",
    *("training.check_digits_equal_one_process_with_adam", "training.check_digits_in_three_passes_equal_one"),
    *("training.check_a_tied_transformer_equals_one_process", "training.check_a_schedule_goes_on_by_steps"),
    *(
        "training.check_a_tied_transformer_in_three_passes_equals_one",
        "training.check_clipping_of_each_acts_on_the_average",
    ),
    "training.check_groups_predivide_and_compression_leave_the_average",
    "training.check_weight_decay_and_moving_averages_are_the_optimizers_own",
}

#: Code that knows neither torch nor TensorFlow, or Keras 3's own part: run with torch.
_AS_WITH_ANY = {
    *("training.check_clipping_acts_on_the_average", "callbacks.check_all_callbacks_together_train"),
    *("callbacks.check_a_schedule_by_steps_by_function_and_by_fractions", "saving.check_a_class_of_the_scripts_own"),
    *("saving.check_weights_go_from_one_optimizer_to_another", "elastic.check_epochs_and_batches_are_counted_on"),
    *("saving.check_one_rank_may_load_what_the_others_build", "saving.check_a_file_is_read_without_horovod"),
    *(
        "callbacks.check_the_best_model_is_saved_by_the_first_rank_alone",
        "callbacks.check_momentum_is_corrected_as_the_rate_is",
    ),
    *("keras3.check_it_trains_eagerly", "callbacks.check_the_ranks_are_equal_before_the_first_batch"),
    "elastic.check_32_restoring_brings_back_weights_and_the_optimizers_state",
    "callbacks.check_a_model_without_an_input_shape_is_equal_after_the_first_batch",
    "keras3.check_clipping_acts_on_the_average_of_its_own_accumulation",
    # Three passes of the kind before are kept.
    "keras2.check_an_optimizer_of_the_kind_before_in_two_passes_equals_one",
}

#: Where the ranks are one, nothing is sent: the ways past that are few, and what is trained is what Keras itself trains.
_ALONE = {
    *("training.check_the_silent_bug_of_two_and_four_tenths", "training.check_digits_in_two_passes_equal_one"),
    *("training.check_passes_add_up_unless_they_are_averaged", "training.check_an_optimizer_is_what_it_was"),
    *(
        "keras3.check_its_own_accumulation_sends_the_sums_alone",
        "saving.check_a_loaded_model_averages_again_and_has_its_state",
    ),
    *(
        "callbacks.check_metrics_are_averages_for_the_callbacks_after_it",
        "callbacks.check_a_metric_that_one_rank_lacks_is_named",
    ),
    *(
        "callbacks.check_34_the_warmup_goes_from_a_share_to_the_whole",
        "callbacks.check_the_ranks_are_equal_before_the_first_batch",
    ),
}


def _is_repeated(kind: str, ranks: int, check: str) -> bool:
    """True if the code that this runs is run by a check that stays."""
    if ranks == 1:
        return check not in _ALONE and not check.startswith(("values.", "elastic."))
    if kind == "tf_keras":
        # The checks `keras2` try what Paceline has for its optimizers, beside Keras 3; the rest is what Keras 3 runs.
        return True
    return kind == "keras-tensorflow" and check in _AS_WITH_TORCH | _AS_WITH_ANY


# The first of a world waits for all of it.
@pytest.mark.promise("training-several-ranks-equals-one", "under-keras-3-gradients-averaged")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "ranks", "check"),
    [
        pytest.param(kind, ranks, check, marks=[pytest.mark.proof] if _is_repeated(kind, ranks, check) else [])
        for kind, ranks in PLACES
        for check in checks(kind)
    ],
)
def test_keras_compatibility_check_passes_on_every_rank(outcome, kind, ranks, check):
    outcome(kind, ranks, check)
