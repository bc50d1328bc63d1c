"""Every check of `checks/`, on the worlds that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parallel.world import WHOLE, checks_of, matrices, modules

#: What two ranks show as well: on four it has no layout of its own, and costs four times as much. Or what a check of several
#: things at once shows on four: uneven batches and clipping are in `check_every_model_ends_as_in_one_process`.
_AS_ON_TWO = {
    *("data.check_microbatches_equal_accumulation", "data.check_a_batch_of_one_row"),
    *("data.check_single_precision_stays_close", "data.check_batches_that_do_not_divide"),
    "data.check_clipping_is_by_the_norm_of_the_whole",
    *("pipeline.check_single_precision_stays_close", "pipeline.check_batches_of_any_size_go_through"),
    "pipeline.check_clipping_is_by_the_norm_of_all_stages",
    *("pipeline.check_inputs_and_outputs_of_any_kind", "pipeline.check_frozen_stages"),
    *("pipeline.check_what_is_never_called_does_not_decay", "reads.check_what_the_loop_changes_is_followed"),
    *("stages.check_a_cut_by_hand_is_taken", "stages.check_cuts_that_can_not_be_made_are_refused_on_every_rank"),
    *("stages.check_what_runs_is_what_is_drawn", "tensor.check_loss_and_gradients_are_those_of_one_process"),
    "stages.check_dropout_is_reproducible_and_each_stage_has_its_own",
    "stages.check_1f1b_keeps_the_activations_of_as_many_microbatches_as_stages_are_left",
    "stages.check_each_worker_holds_its_part_of_the_model_alone",
    *("tensor.check_a_table_of_names_gives_the_same_numbers", "tensor.check_explain_says_what_was_cut"),
    *("tensor.check_a_module_that_differs_is_named", "tensor.check_torchs_own_encoder_is_cut_too"),
    *("tensor.check_each_rank_holds_its_part_alone", "tensor.check_dropout_is_the_same_on_all_tensor_ranks"),
    *("tensor.check_a_tie_that_is_not_made_again_is_seen", "tensor.check_without_the_tie_training_would_be_wrong"),
    "tensor.check_evaluation_and_the_whole_state_are_those_of_one_process",
    "tensor.check_the_plan_is_that_of_the_first_rank",
    "tensor.check_what_is_changed_in_place_between_two_layers_is_right",
    "tensor.check_a_model_that_can_not_compute_few_rows_is_cut_by_all_of_them",
    "families.check_gpt2_is_cut_by_heads_and_equals_one_process",
    # Cuts in two dimensions equal one process in `large.check_from_nothing_and_from_safetensors`, which saves and loads them too.
    *("tensor.check_five_steps_of_adamw_are_those_of_one_process", "large.check_computed_again_and_in_parts"),
    # Products have no way of their own to follow weights, or to step.
    "average.check_averages_and_a_frozen_twin_equal_one_process",
    "average.check_averages_go_on_from_a_checkpoint_of_another_layout",
    "optimizers.check_every_optimizer_equals_one_process_or_is_refused",
    # The matrix of checkpoints has tensors that are cut twice, and stages of replicas.
    "checkpoint.check_combined_layouts_go_on_from_each_other",
}

#: Here a part of a strategy is made wrong, and the comparison has to see it: this tries the checks more than the strategies.
_OF_MUTANTS = ("mutations.", "mutations_cut.", "stages.check_with_", "stages.check_without_", "tensor.check_without_")
#: Those that a promise names.
_KEPT_OF_MUTANTS = {
    "mutations_cut.check_a_stale_attribute_is_seen_in_each_strategy",
    "mutations_cut.check_another_random_number_is_seen_in_each_strategy",
}
#: Checks that show no more than another check on the same ranks.
_AS_OTHERS = {
    # Five steps of AdamW have the loss and the gradients of each.
    "tensor.check_loss_and_gradients_are_those_of_one_process",
    # Half precision goes the way of single, which is tried with every strategy.
    *("stages.check_half_precision_is_that_of_one_process", "loop.check_half_precision_stays_near"),
    # That each strategy follows an attribute is seen where the same one is made stale, in `mutations_cut`.
    "reads.check_replicas_and_parts_follow_too",
    # Of uneven batches, those on four workers and those in several parts have microbatches too.
    *("pipeline.check_batches_of_any_size_go_through", "data.check_microbatches_equal_accumulation"),
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
def test_parallel_check_passes_on_every_rank(size: int, check: str, outcome: Callable[[int, str], None]) -> None:
    outcome(size, check)
