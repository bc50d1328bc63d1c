"""Submit jobs: check them, copy sources, read secrets, and start a run's supervisor."""

from paceline.submit.checks import check
from paceline.submit.source import SourceCopy, check_source, not_copied, snapshot_folder, take_snapshot
from paceline.submit.submission import NewRun, Submission, being_started, first_record, prepare, submit, submit_again
from paceline.submit.values import in_places_of, places_of, unrecorded, values_of

__all__ = [
    "NewRun",
    "SourceCopy",
    "Submission",
    "being_started",
    "check",
    "check_source",
    "first_record",
    "in_places_of",
    "not_copied",
    "places_of",
    "prepare",
    "snapshot_folder",
    "submit",
    "submit_again",
    "take_snapshot",
    "unrecorded",
    "values_of",
]
