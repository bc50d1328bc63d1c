"""`azureml._restclient.constants`: the states of a run."""

from __future__ import annotations

import builtins

__all__ = ["RUN_ORIGIN", "RunStatus"]

RUN_ORIGIN = "ExperimentRun"


class RunStatus:
    """Run states. Paceline never reports Provisioning, Unapproved, Pausing or Paused."""

    QUEUED = "Queued"
    NOT_STARTED = "NotStarted"
    PREPARING = "Preparing"
    PROVISIONING = "Provisioning"
    STARTING = "Starting"
    RUNNING = "Running"
    CANCEL_REQUESTED = "CancelRequested"
    CANCELED = "Canceled"
    FINALIZING = "Finalizing"
    COMPLETED = "Completed"
    FAILED = "Failed"
    UNAPPROVED = "Unapproved"
    NOTRESPONDING = "NotResponding"
    PAUSING = "Pausing"
    PAUSED = "Paused"

    @classmethod
    def list(cls) -> builtins.list[str]:
        return [value for name, value in vars(cls).items() if name.isupper()]

    @classmethod
    def get_running_statuses(cls) -> builtins.list[str]:
        """Return the states of a run that waits or runs."""
        ended = {cls.CANCEL_REQUESTED, cls.FINALIZING, cls.COMPLETED, cls.FAILED, cls.CANCELED}
        return [one for one in cls.list() if one not in ended]

    @classmethod
    def get_post_processing_statuses(cls) -> builtins.list[str]:
        """Return the states of a run that is about to end."""
        return [cls.CANCEL_REQUESTED, cls.FINALIZING]
