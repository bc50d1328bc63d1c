"""What an attempt has left: brought here from nodes elsewhere, and output folders stored where they belong."""

from __future__ import annotations

import contextlib
import dataclasses

from paceline.errors import PacelineError, TargetError
from paceline.library import library_dir
from paceline.runs import notes, states
from paceline.runs.failure import FailureReport
from paceline.runs.files import read_json, write_json
from paceline.supervisor.attempt import Outcome
from paceline.supervisor.beside import Beside
from paceline.supervisor.driver_log import say
from paceline.supervisor.nodes import Done, on_nodes
from paceline.supervisor.supervision import Supervision

#: The property of a run whose files could not all be had, in words: which, and where they still are.
NOT_FETCHED = "not_fetched"


def brought_home(run: Supervision, outcome: Outcome) -> Outcome:
    """The outcome once the run's files are here, which is part of it.

    Those that can't be had are named, with the place where they still are, in the failure and in a property of the run.
    """
    assert run.nodes is not None
    try:
        run.nodes.fetch()
    except TargetError as error:
        text = str(error)
        say(text)
        with contextlib.suppress(OSError, PacelineError):
            name = f"{NOT_FETCHED}_{len(run.record.attempts)}" if len(run.record.attempts) > 1 else NOT_FETCHED
            notes.add_properties(run.folder.notes, {name: text})
        if outcome.failure is not None:
            message = f"{outcome.failure.message} {text}"
            return dataclasses.replace(outcome, failure=dataclasses.replace(outcome.failure, message=message))
        if outcome.stopped is None:
            return dataclasses.replace(outcome, failure=FailureReport(cause="data", message=text))
    return outcome


def from_here(run: Supervision, verb: str) -> Done:
    """How it went to "check" outputs, or to "store" them, from the supervisor's own machine."""
    nodes = Beside()
    seen = nodes.send(run.folder, library_dir(run.folder.path.parent.parent))
    return on_nodes(verb, [0], folder=run.folder, nodes=nodes, seen=seen, wake=run.wake, stop=run.cancel_reason)


def with_outputs_stored(run: Supervision, outcome: Outcome) -> Outcome:
    """The outcome once output folders are stored, which is part of it. A canceled run stores nothing, nor does one that
    its engine starts again."""
    if not any(reference.is_output for reference in run.job.inputs) or not run.record.attempts:
        return outcome
    if outcome.stopped == "interrupted":
        return outcome
    if outcome.stopped == "cancel":
        say(f"canceled: outputs are not stored; they are in {run.folder.uploads}")
        return outcome
    run.to(states.FINALIZING)
    if run.nodes is None or run.seen is None or not run.seen.is_shared or run.nodes.lost():
        done = from_here(run, "store")  # what the nodes had has been brought here
    else:
        done = on_nodes(
            "store", [0], folder=run.folder, nodes=run.nodes, seen=run.seen, wake=run.wake, stop=run.cancel_reason
        )
    if done.results:
        told = read_json(run.folder.data) or {}
        write_json(run.folder.data, told | done.results[0])
    if done.stopped:
        say(f"canceled while outputs were being stored; what is left of them is in {run.folder.uploads}")
    if done.stopped and outcome.failure is None:
        return dataclasses.replace(outcome, stopped=done.stopped)
    if done.failure is not None:
        message = f"{done.failure.message} The files that are not stored are in {str(run.folder.uploads)!r}."
        say(message)
        failure = dataclasses.replace(done.failure, message=message)
        return outcome if outcome.failure or outcome.stopped else dataclasses.replace(outcome, failure=failure)
    return outcome
