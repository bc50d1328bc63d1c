"""Remove old runs, and unused snapshots, environments, cached data and model files."""

from paceline.pruning.families import PrunePolicy
from paceline.pruning.prune import KINDS, Pruned, Removed, prune

__all__ = ["KINDS", "PrunePolicy", "Pruned", "Removed", "prune"]
