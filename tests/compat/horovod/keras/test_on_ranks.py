"""Every check of `checks/` that is for a Keras: Keras 3 on TensorFlow and on torch, and tf_keras."""

from __future__ import annotations

import pytest

from tests.compat.horovod.keras.conftest import checks

#: Three ranks run only with torch, because these processes start fastest.
PLACES = [("keras-tensorflow", 2), ("keras-torch", 1), ("keras-torch", 3), ("tf_keras", 2)]
#: `make test` runs these checks with torch only. Paceline uses the same code for TensorFlow, which would compile a
#: graph for seconds. With TensorFlow, the checks in `graphs` train the digits and an embedding, and
#: tensorflow/test_on_ranks.py trains a tied embedding.
_AS_WITH_TORCH = {
    *(
        "training.check_digits_training_equals_one_process",
        "training.check_digits_training_with_two_backward_passes_equals_one_process",
    ),
    "training.check_tied_transformer_with_two_backward_passes_equals_one_process",
    *(
        "training.check_digits_training_with_adam_equals_one_process",
        "training.check_digits_training_with_three_backward_passes_equals_one_process",
    ),
    *(
        "training.check_transformer_with_tied_weights_equals_one_process",
        "training.check_learning_rate_schedule_equals_one_process",
    ),
    *(
        "training.check_tied_transformer_with_three_backward_passes_equals_one_process",
        "training.check_per_variable_clipping_acts_on_averaged_gradients",
    ),
    "training.check_gradient_groups_predivide_and_compression_keep_the_average",
    "training.check_weight_decay_and_moving_averages_equal_one_process",
}

#: Checks of code that does not depend on torch or TensorFlow. `make test` runs them with torch only.
_AS_WITH_ANY = {
    *(
        "training.check_global_norm_clipping_acts_on_averaged_gradients",
        "callbacks.check_training_with_all_callbacks_learns_the_digits",
    ),
    *(
        "callbacks.check_learning_rate_schedule_callback_accepts_factors_and_functions",
        "saving.check_model_with_a_custom_optimizer_class_is_loaded",
    ),
    *(
        "saving.check_saved_weights_are_loaded_with_another_optimizer",
        "elastic.check_elastic_callbacks_continue_the_epoch_and_batch_count",
    ),
    *(
        "saving.check_model_loaded_on_one_rank_is_broadcast_to_models_built_on_others",
        "saving.check_saved_model_is_loaded_without_horovod",
    ),
    *(
        "callbacks.check_best_model_checkpoint_is_saved_only_by_rank_0",
        "callbacks.check_momentum_is_corrected_when_the_learning_rate_changes",
    ),
    *(
        "keras3.check_eager_training_equals_one_process",
        "callbacks.check_broadcast_callback_makes_ranks_equal_before_the_first_batch",
    ),
    "elastic.check_restore_resets_weights_and_optimizer_state_to_the_commit",
    "callbacks.check_model_without_an_input_shape_is_equal_on_all_ranks_after_the_first_batch",
    "keras3.check_clipping_with_keras_gradient_accumulation_equals_one_process",
    # The check with three backward passes of this optimizer stays in `make test`.
    "keras2.check_legacy_optimizer_with_two_backward_passes_equals_one_process",
}

#: Checks that `make test` leaves out on one rank. Nothing is sent there, so these checks mainly test Keras itself.
_ALONE = {
    *(
        "training.check_gradients_are_averaged_in_fit",
        "training.check_digits_training_with_two_backward_passes_equals_one_process",
    ),
    *(
        "training.check_backward_passes_are_summed_unless_averaging_is_requested",
        "training.check_distributed_optimizer_keeps_class_config_and_learning_rate",
    ),
    *(
        "keras3.check_keras_gradient_accumulation_equals_one_process",
        "saving.check_loaded_model_averages_gradients_and_has_its_optimizer_state",
    ),
    *(
        "callbacks.check_later_callbacks_get_metrics_averaged_over_the_ranks",
        "callbacks.check_metric_missing_on_one_rank_is_named",
    ),
    *(
        "callbacks.check_warmup_callback_raises_the_learning_rate_linearly",
        "callbacks.check_broadcast_callback_makes_ranks_equal_before_the_first_batch",
    ),
}


def _is_repeated(kind: str, ranks: int, check: str) -> bool:
    """True if the code that this runs is run by a check that stays."""
    if ranks == 1:
        return check not in _ALONE and not check.startswith(("values.", "elastic."))
    if kind == "tf_keras":
        # With tf_keras, `make test` runs only the checks in `keras2`, which cover Paceline's code for tf_keras.
        return True
    return kind == "keras-tensorflow" and check in _AS_WITH_TORCH | _AS_WITH_ANY


# All checks on the same number of ranks run together, and the first of these tests waits for all of them.
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
