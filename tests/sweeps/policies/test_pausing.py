"""Policies that pause trials."""

from __future__ import annotations

import pytest

from paceline.errors import SweepError
from paceline.sweeps.policies.asha import ASHA
from paceline.sweeps.policies.pausing import PausingPolicy, check_budget, pausing
from paceline.sweeps.policies.policy import Policy
from paceline.sweeps.policies.population import PopulationBasedTraining


def test_policy_other_than_asha_promotion_and_population_based_training_is_not_a_pausing_policy() -> None:
    promoting, population = ASHA(promote=True), PopulationBasedTraining(interval=2, last=4)
    assert pausing(promoting) is promoting
    assert pausing(population) is population
    assert all(isinstance(policy, (Policy, PausingPolicy)) for policy in (promoting, population))
    assert pausing(ASHA()) is pausing(None) is None


def test_budget_option_needs_the_name_of_a_script_argument_and_a_last_interval() -> None:
    check_budget("ASHA", None, None)
    check_budget("ASHA", "--epochs", 9)
    for budget in ("", "--", "a b", "--epochs=3", 3):
        with pytest.raises(SweepError, match="is not an argument"):
            check_budget("ASHA", budget, 9)
    with pytest.raises(SweepError, match="needs last"):
        check_budget("ASHA", "--epochs", None)
