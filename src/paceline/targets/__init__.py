"""Compute targets: where nodes come from, and how command lines start on them."""

from __future__ import annotations

from paceline.system.lazy_import import face

# Don't import `typing`, because it is slow to load, and every `paceline run` loads this package before it starts a supervisor.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.targets.base import Nodes, Preview, Target, Waiting
    from paceline.targets.configured import ComputeTargets, Configured, add, find_target, target_of_run

__all__ = [
    "ComputeTargets",
    "Configured",
    "Nodes",
    "Preview",
    "Target",
    "Waiting",
    "add",
    "find_target",
    "target_of_run",
]

_HOMES = {
    "paceline.targets.base": ("Nodes", "Preview", "Target", "Waiting"),
    "paceline.targets.configured": ("ComputeTargets", "Configured", "add", "find_target", "target_of_run"),
}

__getattr__ = face(__name__, _HOMES)
