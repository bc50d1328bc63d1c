"""Sweeps: one run for each point of a search space, on any compute target, with early stopping.

This package exports the names that other packages use. Each name is imported on its first use.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.sweeps.expressions import Choice, Expression, Uniform
    from paceline.sweeps.policies.policy import Policy
    from paceline.sweeps.samplers.samplers import check_sampler
    from paceline.sweeps.space import Space
    from paceline.sweeps.spec import SweepSpec
    from paceline.sweeps.start import submit_sweep
    from paceline.sweeps.trial import Goal, Trial, cost, is_better
    from paceline.sweeps.trial_runs import trials

_HOMES = {
    "paceline.sweeps.expressions": ("Choice", "Expression", "Uniform"),
    "paceline.sweeps.policies.policy": ("Policy",),
    "paceline.sweeps.samplers.samplers": ("check_sampler",),
    "paceline.sweeps.space": ("Space",),
    "paceline.sweeps.spec": ("SweepSpec",),
    "paceline.sweeps.start": ("submit_sweep",),
    "paceline.sweeps.trial": ("Goal", "Trial", "cost", "is_better"),
    "paceline.sweeps.trial_runs": ("trials",),
}

__all__ = [
    "Choice",
    "Expression",
    "Goal",
    "Policy",
    "Space",
    "SweepSpec",
    "Trial",
    "Uniform",
    "check_sampler",
    "cost",
    "is_better",
    "submit_sweep",
    "trials",
]

__getattr__ = face(__name__, _HOMES)
