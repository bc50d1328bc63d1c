"""Runs: their states, folders, records, metrics, files and logs, and the live handle `Run`.

This package exports the names that other packages use, and loads their modules on first use.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.runs.artifacts import copy_out, files_below
    from paceline.runs.folder import RunFolder
    from paceline.runs.ids import check_run_id, new_run_id
    from paceline.runs.interactive import is_ours
    from paceline.runs.media import image_source
    from paceline.runs.metrics import plain_file_name
    from paceline.runs.offline import OfflineRun
    from paceline.runs.page_address import page_of
    from paceline.runs.read import all_records
    from paceline.runs.record import RunRecord
    from paceline.runs.run import ExperimentLike, Run
    from paceline.runs.run_metrics import LogsMetrics

_HOMES = {
    "paceline.runs.artifacts": ("copy_out", "files_below"),
    "paceline.runs.folder": ("RunFolder",),
    "paceline.runs.ids": ("check_run_id", "new_run_id"),
    "paceline.runs.interactive": ("is_ours",),
    "paceline.runs.media": ("image_source",),
    "paceline.runs.metrics": ("plain_file_name",),
    "paceline.runs.offline": ("OfflineRun",),
    "paceline.runs.page_address": ("page_of",),
    "paceline.runs.read": ("all_records",),
    "paceline.runs.record": ("RunRecord",),
    "paceline.runs.run": ("ExperimentLike", "Run"),
    "paceline.runs.run_metrics": ("LogsMetrics",),
}

__all__ = [
    "ExperimentLike",
    "LogsMetrics",
    "OfflineRun",
    "Run",
    "RunFolder",
    "RunRecord",
    "all_records",
    "check_run_id",
    "copy_out",
    "files_below",
    "image_source",
    "is_ours",
    "new_run_id",
    "page_of",
    "plain_file_name",
]

__getattr__ = face(__name__, _HOMES)
