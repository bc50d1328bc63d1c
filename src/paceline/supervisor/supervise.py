"""See one run through: its attempts, its outputs, its end."""

from __future__ import annotations

from paceline.errors import EngineError, TargetError, UserError
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.supervisor.attempt import Outcome
from paceline.supervisor.attempts import attempts
from paceline.supervisor.finishing import fail_internally, finish
from paceline.supervisor.storing import settle_links, with_outputs_stored
from paceline.supervisor.supervision import Supervision
from paceline.targets import target_of_run


def supervise(folder: RunFolder) -> None:
    """See the run of this folder to its end. The caller holds the run's lock. Never raises once the record can be read."""
    run = Supervision(folder)
    try:
        outcome = _attempts(run)
        settle_links(run, outcome)
        finish(run, with_outputs_stored(run, outcome))
    except BaseException as error:
        fail_internally(run, error)


def _attempts(run: Supervision) -> Outcome:
    try:
        run.target = target_of_run(run.folder.path)
        return attempts(run)
    except (UserError, EngineError) as error:
        # What only the nodes could show: the job can't have them, or the environment that was made has no mpirun.
        cause = "engine" if isinstance(error, (TargetError, EngineError)) else "launcher"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))
