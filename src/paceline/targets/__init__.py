"""Compute targets: where nodes come from, and how command lines start on them."""

from paceline.targets.base import Nodes, Preview, Target, Waiting
from paceline.targets.configured import find_target, target_of_run

__all__ = ["Nodes", "Preview", "Target", "Waiting", "find_target", "target_of_run"]
