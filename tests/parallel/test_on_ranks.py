"""Every check of `checks/`, on the worlds that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parallel.world import WHOLE, checks_of, matrices, modules

#: Checks that `make test` runs on two ranks only. On four ranks they have no other layout and take four times as long,
#: or another check covers them: uneven batches and clipping are in
#: `pipeline.check_pipeline_training_of_every_model_equals_one_process`.
_AS_ON_TWO = {
    *("data.check_microbatches_equal_gradient_accumulation", "data.check_batch_of_one_row_equals_one_process"),
    *(
        "data.check_float32_data_parallel_training_stays_close_to_one_process",
        "data.check_batches_not_divisible_by_the_replicas_equal_one_process",
    ),
    "data.check_gradients_are_clipped_by_the_norm_of_the_whole_model",
    *(
        "pipeline.check_float32_pipeline_training_stays_close_to_one_process",
        "pipeline.check_batches_of_any_size_equal_one_process",
    ),
    "pipeline.check_gradients_are_clipped_by_the_norm_of_all_stages",
    *(
        "pipeline.check_inputs_and_outputs_of_any_type_equal_one_process",
        "pipeline.check_pipeline_with_frozen_stages_equals_one_process",
    ),
    *(
        "pipeline.check_module_that_is_never_called_gets_no_weight_decay",
        "reads.check_pipeline_uses_values_that_the_loop_changes_between_steps",
    ),
    *(
        "stages.check_stage_boundaries_given_by_name_are_used",
        "stages.check_invalid_stage_boundaries_are_refused_on_every_rank",
    ),
    *(
        "stages.check_executed_schedule_equals_the_drawn_schedule",
        "tensor.check_tensor_parallel_loss_and_gradients_equal_one_process",
    ),
    "stages.check_dropout_is_reproducible_and_differs_between_stages",
    "stages.check_1f1b_stage_keeps_activations_of_one_microbatch_per_remaining_stage",
    "stages.check_each_worker_holds_only_its_stages",
    *("tensor.check_plan_table_training_equals_one_process", "tensor.check_explain_lists_the_split_layers"),
    *(
        "tensor.check_wrong_split_is_detected_and_its_module_named",
        "tensor.check_torch_transformer_encoder_is_split_and_equals_one_process",
    ),
    *("tensor.check_each_rank_holds_only_its_tensor_shards", "tensor.check_dropout_is_the_same_on_all_tensor_ranks"),
    *(
        "tensor.check_broken_weight_tie_is_detected_before_training",
        "tensor.check_without_the_weight_tie_gradients_differ",
    ),
    "tensor.check_tensor_parallel_evaluation_and_state_equal_one_process",
    "tensor.check_only_rank_0_computes_the_plan",
    "tensor.check_in_place_activation_between_split_layers_equals_one_process",
    "tensor.check_model_that_needs_many_rows_is_planned_with_the_whole_batch",
    "families.check_gpt2_is_split_by_attention_heads_and_equals_one_process",
    # On four ranks, `large.check_model_built_empty_equals_one_process_after_initialization_or_loading` covers tensors
    # that are split along two dimensions, with saving and loading.
    *(
        "tensor.check_tensor_parallel_adamw_steps_equal_one_process",
        "large.check_activation_recomputation_equals_one_process",
    ),
    # A combination of strategies has no code of its own for moving averages or for optimizer steps.
    "average.check_moving_averages_and_frozen_targets_equal_one_process",
    "average.check_moving_averages_resume_from_a_checkpoint_of_another_layout",
    "optimizers.check_every_optimizer_equals_one_process_or_is_refused",
    # Other checkpoint checks cover tensors that two strategies split, and stages of replicas.
    "checkpoint.check_checkpoint_of_a_combined_layout_resumes_on_another_combined_layout",
}

#: Checks that break a part of a strategy and expect an error. They test the comparison more than the strategy.
_OF_MUTANTS = ("mutations.", "mutations_cut.", "stages.check_with_", "stages.check_without_", "tensor.check_without_")
#: The checks among `_OF_MUTANTS` that `make test` runs, because each of them proves a statement of the documentation.
_KEPT_OF_MUTANTS = {
    "mutations_cut.check_stale_attribute_is_detected_in_each_strategy",
    "mutations_cut.check_different_random_number_on_one_rank_is_detected_in_each_strategy",
}
#: Checks that `make test` skips, because other checks on the same number of ranks run the same code.
_AS_OTHERS = {
    # Another check, with five steps of AdamW, also compares the loss and the gradients of each step.
    "tensor.check_tensor_parallel_loss_and_gradients_equal_one_process",
    # Half precision runs the same code as single precision, which is tested with every strategy.
    *(
        "stages.check_bf16_pipeline_training_equals_one_process",
        "loop.check_bf16_data_parallel_training_stays_close_to_float32",
    ),
    # The checks in `mutations_cut` that make an attribute stale also show that each strategy uses the new value of an
    # attribute.
    "reads.check_other_strategies_use_values_that_the_loop_changes_between_steps",
    # Other checks with uneven batches, on four workers or in several parts, use microbatches too.
    *("pipeline.check_batches_of_any_size_equal_one_process", "data.check_microbatches_equal_gradient_accumulation"),
}


def _is_left_to_proof(size: int, name: str) -> bool:
    is_of_mutants = name.startswith(_OF_MUTANTS) and name not in _KEPT_OF_MUTANTS
    # `make test` does not install torchvision.
    return is_of_mutants or name.startswith("torchvisions.") or name in _AS_OTHERS or (size == 4 and name in _AS_ON_TWO)


def _params() -> Iterator[Any]:
    """Size and check. In `make test` a matrix has those cells that cover it; as a whole it is in `make proof`."""
    for module in modules():
        whole = matrices(module)
        for check, sizes in checks_of(module).items():
            name = f"{module}.{check}"
            for size in sizes:
                is_proof = _is_left_to_proof(size, name)
                if check in whole:
                    yield pytest.param(size, name + WHOLE, id=f"{name}{WHOLE}-{size}", marks=pytest.mark.proof)
                if not (is_proof and check in whole):
                    yield pytest.param(size, name, id=f"{name}-{size}", marks=[pytest.mark.proof] * is_proof)


@pytest.mark.timeout(5700)
@pytest.mark.parametrize(("size", "check"), list(_params()))
def test_each_function_of_the_checks_folder_passes_on_every_rank(
    size: int, check: str, outcome: Callable[[int, str], None]
) -> None:
    outcome(size, check)
