"""Where workers run: a target gives nodes and starts command lines on them."""

from paceline.targets.base import Granted, Started, Target, get_target, target_names

__all__ = ["Granted", "Started", "Target", "get_target", "target_names"]
