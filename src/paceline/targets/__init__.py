"""Compute targets: where nodes come from, and how command lines start on them."""

from paceline.targets.base import Ended, Nodes, Preview, Seen, Started, Target, Waiting
from paceline.targets.configured import find_target, target_of_run

__all__ = ["Ended", "Nodes", "Preview", "Seen", "Started", "Target", "Waiting", "find_target", "target_of_run"]
