"""Attempt after attempt, until one ends well, one fails in a way that would come again, or none is left."""

from __future__ import annotations

import dataclasses

from paceline.errors import EngineError, TargetError
from paceline.runs.failure import EXIT_PREEMPTED, FailureReport, logs_command
from paceline.runs.record import RunRecord
from paceline.supervisor.attempt import Outcome
from paceline.supervisor.diagnosis.retries import NODES_GONE, is_retried
from paceline.supervisor.driver_log import say
from paceline.supervisor.launching import attempt
from paceline.supervisor.long_logs import shorten_logs
from paceline.supervisor.preparing import give_nodes_back, hold_nodes
from paceline.supervisor.storing import brought_home
from paceline.supervisor.supervision import Supervision


def attempts(run: Supervision) -> Outcome:
    """How the last one ended. Each runs on the nodes of the one before, unless these are gone.

    Raises:
        UserError: there never were any nodes, or what only they could show: the environment has no mpirun.
    """
    run.note_preemption()
    number = len(run.record.attempts)  # not 0 where the engine has put the job back into its queue
    if number > run.job.max_restarts and number:
        return Outcome(failure=_interrupted(run.record))
    tried, failure = number, None
    while True:
        tried += 1
        try:
            outcome = hold_nodes(run) if run.nodes is None else None
        except (TargetError, EngineError) as error:
            if failure is None:
                raise
            return Outcome(failure=_extended(failure, f"There were no nodes for another attempt: {error}"))
        if outcome is None:
            number += 1
            outcome = brought_home(run, attempt(run, number))
            shorten_logs(run.folder, number, run.job.world_size)
            run.close_attempt(outcome)
        failure = outcome.failure
        if failure is None or not is_retried(failure, run.job) or tried > run.job.max_restarts:
            return outcome
        say(f"attempt {tried} failed ({failure.cause}): {failure.message} Starting the next.")
        if failure.cause in NODES_GONE or (run.nodes is not None and run.nodes.lost()):
            give_nodes_back(run)
        elif failure.cause == "port" and run.nodes is not None:
            run.nodes.renew_ports()  # on the same nodes: the run keeps its turn


def _interrupted(record: RunRecord) -> FailureReport:
    """Why a run that its engine has started again goes no further."""
    last = record.attempts[-1]
    return FailureReport(
        cause="preempted",
        message=f"Attempt {last.number} was interrupted: the engine took its nodes away or lost them. "
        f"max_restarts={record.job.max_restarts if record.job else 0} allows no further attempt.",
        exit_code=EXIT_PREEMPTED,
        attempt=last.number,
        see=logs_command(record.run_id),
    )


def _extended(report: FailureReport, text: str) -> FailureReport:
    return dataclasses.replace(report, message=f"{report.message} {text}")
