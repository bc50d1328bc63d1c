"""Removes what a workspace no longer needs: old runs, snapshots and environments that no run uses, cached data."""

from paceline.pruning.prune import KINDS, Pruned, Removed, prune
from paceline.pruning.wish import Wish

__all__ = ["KINDS", "Pruned", "Removed", "Wish", "prune"]
