"""What is written down at the end of a run with children."""

from __future__ import annotations

from typing import Any

from paceline.runs import states, store
from paceline.runs.driver_log import say
from paceline.runs.failure import EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.system.files import read_json


def close(folder: RunFolder, record: RunRecord, failure: FailureReport | None) -> RunRecord:
    """Write down the end of a run none of whose children runs any more; its record then. failure: None where it is Completed."""
    told: dict[str, Any]
    # A cancel goes before a failure: it is why the run ended, however its children did.
    if folder.cancel_request.exists():
        by = (read_json(folder.cancel_request) or {}).get("by", "unknown")
        status, told = states.CANCELED, {"exit_code": EXIT_CANCELED, "canceled_by": str(by)}
    elif failure is not None:
        status, told = states.FAILED, {"exit_code": failure.exit_code, "failure": failure}
    else:
        status, told = states.COMPLETED, {"exit_code": 0}
    record = store.change(folder, record, status, ended_utc=utc_now(), waiting_for=None, **told)
    # Not always what was asked for: a cancel may have been `Run.fail`.
    say(f"the {record.kind} is {record.status}")
    return record
