"""Removes what a workspace no longer needs: old runs, snapshots and environments that no run uses, cached data."""

from paceline.pruning.families import Wish
from paceline.pruning.prune import KINDS, Pruned, Removed, prune

__all__ = ["KINDS", "Pruned", "Removed", "Wish", "prune"]
