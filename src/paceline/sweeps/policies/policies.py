"""Create stopping policies from JSON records or from command-line text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from paceline.errors import SweepError
from paceline.sweeps.expressions import call_of
from paceline.sweeps.policies.asha import ASHA, Hyperband
from paceline.sweeps.policies.policy import Bandit, MedianStopping, Policy, TruncationSelection
from paceline.sweeps.policies.population import PopulationBasedTraining
from paceline.system.names import did_you_mean

POLICIES: dict[str, type[Any]] = {
    policy.NAME: policy
    for policy in (Bandit, MedianStopping, TruncationSelection, ASHA, Hyperband, PopulationBasedTraining)
}


def policy_from_json(data: Mapping[str, Any]) -> Policy:
    """Convert JSON from `NamedPolicy.to_json` to a policy."""
    policy: Policy = POLICIES[data["name"]](**{name: value for name, value in data.items() if name != "name"})
    return policy


def parse_policy(text: str) -> Policy:
    """Parse a policy such as `asha` or `bandit(slack_factor=0.1, delay_evaluation=5)`.

    Raises:
        SweepError: The name or a parameter is unknown.
    """
    name, words = call_of(text) or (text.strip(), [])
    if name not in POLICIES:
        raise SweepError(
            f"stop={text!r}: there is no policy {name!r}.{did_you_mean(name, POLICIES)} Write one of {', '.join(POLICIES)}."
        )
    known = [f.name for f in fields(POLICIES[name])]
    parameters: dict[str, object] = {}
    for key, value in words:
        if key not in known:
            raise SweepError(f"stop={text!r}: write each parameter as name=value; {name} has {', '.join(known)}.")
        parameters[key] = value
    needed = [f.name for f in fields(POLICIES[name]) if f.default is MISSING]
    if missing := [key for key in needed if key not in parameters]:
        raise SweepError(
            f"stop={text!r}: {name} needs {' and '.join(missing)}, as in {name}({', '.join(f'{key}=...' for key in needed)})."
        )
    policy: Policy = POLICIES[name](**parameters)
    return policy
