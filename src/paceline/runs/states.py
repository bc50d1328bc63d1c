"""The states of a run, named as in the Azure Machine Learning SDK.

    NotStarted -> Queued -> Preparing -> Starting -> Running -> Finalizing -> Completed | Failed | Canceled

Readers report two more states: CancelRequested until the supervisor acts on a request to cancel, and NotResponding for a run
on another machine whose supervisor is silent.
"""

from __future__ import annotations

NOT_STARTED = "NotStarted"
QUEUED = "Queued"
PREPARING = "Preparing"
STARTING = "Starting"
RUNNING = "Running"
CANCEL_REQUESTED = "CancelRequested"
NOT_RESPONDING = "NotResponding"
FINALIZING = "Finalizing"
COMPLETED = "Completed"
FAILED = "Failed"
CANCELED = "Canceled"

TERMINAL = frozenset({COMPLETED, FAILED, CANCELED})
ALL = (
    NOT_STARTED,
    QUEUED,
    PREPARING,
    STARTING,
    RUNNING,
    CANCEL_REQUESTED,
    NOT_RESPONDING,
    FINALIZING,
    COMPLETED,
    FAILED,
    CANCELED,
)


def is_final(state: object) -> bool:
    """Return whether the status in the content of a `state.json` is final."""
    return isinstance(state, dict) and isinstance(state.get("status"), str) and state["status"] in TERMINAL
