"""Content-addressed copies of source directories in the workspace."""

from paceline.snapshot.git import git_state
from paceline.snapshot.scan import LIMIT_VARIABLE, MAX_BYTES, MAX_FILES
from paceline.snapshot.store import Progress, Snapshot, check_folder, take

__all__ = [
    "LIMIT_VARIABLE",
    "MAX_BYTES",
    "MAX_FILES",
    "Progress",
    "Snapshot",
    "check_folder",
    "git_state",
    "scan",
    "take",
]
