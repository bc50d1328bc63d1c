"""Every check of `checks/`, on the worlds that it is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.world import checks_of, modules

#: What two ranks show as well: on four it has no layout of its own, and costs four times as much.
_AS_ON_TWO = {
    *("data.check_microbatches_equal_accumulation", "data.check_a_batch_of_one_row"),
    *("pipeline.check_inputs_and_outputs_of_any_kind", "pipeline.check_frozen_stages"),
    *("pipeline.check_what_is_never_called_does_not_decay", "reads.check_what_the_loop_changes_is_followed"),
    *("stages.check_a_cut_by_hand_is_taken", "stages.check_cuts_that_can_not_be_made_are_refused_on_every_rank"),
    *("stages.check_what_runs_is_what_is_drawn", "tensor.check_loss_and_gradients_are_those_of_one_process"),
    *("tensor.check_a_table_of_names_gives_the_same_numbers", "tensor.check_explain_says_what_was_cut"),
    *("tensor.check_a_module_that_differs_is_named", "tensor.check_torchs_own_encoder_is_cut_too"),
    "tensor.check_what_is_changed_in_place_between_two_layers_is_right",
    "tensor.check_a_model_that_can_not_compute_few_rows_is_cut_by_all_of_them",
    "families.check_gpt2_is_cut_by_heads_and_equals_one_process",
}
#: Matrices, of which other checks have the cells that differ most.
_WHOLE = {"kinds.check_all_models_of_torchs_own_parts", "families.check_all_models_of_transformers"}
CHECKS = [
    pytest.param(
        size,
        f"{module}.{check}",
        id=f"{module}.{check}-{size}",
        marks=[pytest.mark.proof] if f"{module}.{check}" in (_WHOLE | _AS_ON_TWO if size == 4 else _WHOLE) else [],
    )
    for module in modules()
    for check, sizes in checks_of(module).items()
    for size in sizes
]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("size", "check"), CHECKS)
def test_on_ranks(size: int, check: str, outcome: Callable[[int, str], None]) -> None:
    outcome(size, check)
