"""Fetch an attempt's files from remote nodes, and store its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Mapping

from paceline.errors import EngineError, PacelineError, TargetError
from paceline.runs import excluded_files, run_data, states, tags_and_properties, work_dir
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.supervisor.nodes import from_here, on_nodes
from paceline.supervisor.prepare import give_nodes_back
from paceline.supervisor.supervision import Outcome, Supervision

#: Property of a run whose files could not be fetched: the names of the files, and the machine that has them.
NOT_FETCHED = "not_fetched"
#: Maximum number of missing files to name in the failure's message.
_NAMED = 5
#: Seconds in which the nodes have to write the training states that they keep in memory as checkpoints.
_RESCUE_S = 300.0


def brought_home(run: Supervision, outcome: Outcome) -> Outcome:
    """Fetch an attempt's files from the nodes. Return the outcome, including a failure to fetch.

    If files could not be fetched, the failure and a property of the run name the files and the machine that has them.
    """
    assert run.nodes is not None
    try:
        run.nodes.fetch()
    except (TargetError, EngineError) as error:
        text = str(error)
        say(text)
        # Don't note files of lost nodes as not fetched: an elastic run may lose many nodes, and the log names the files.
        if not (run.job.node_range and run.nodes.lost()):
            _note_not_fetched(run, text)
        if outcome.failure is not None:
            message = f"{outcome.failure.message} {text}"
            return dataclasses.replace(outcome, failure=dataclasses.replace(outcome.failure, message=message))
        if outcome.stopped is None:
            return dataclasses.replace(outcome, failure=FailureReport(cause="data", message=text))
    return outcome


def rescue_states(run: Supervision) -> None:
    """Let the nodes write the training states in their memory as checkpoints.

    A failure is only logged, because the next attempt can continue from the newest checkpoint on the disk.
    """
    nodes, seen, number = run.nodes, run.seen, len(run.record.attempts)
    assert nodes is not None
    if (
        seen is None
        or not run.spares.path
        or not any(run.folder.attempt(number).glob(run.folder.kept(number, "*").name))
    ):
        return
    deadline = time.monotonic() + _RESCUE_S
    lost = nodes.lost()
    left = [node.node_rank for node in nodes.nodes if node.node_rank not in lost]
    try:
        done = on_nodes(
            run,
            "rescue",
            left,
            nodes,
            seen,
            lambda: run.cancel_reason() or ("time" if time.monotonic() > deadline else None),
            ("--spare", run.spares.path, "--lost", ",".join(map(str, lost))),
        )
    except EngineError as error:
        say(f"the states in the nodes' memory are lost: {error}")
        return
    if done.failure is not None:
        say(f"the states in the nodes' memory are not all written: {done.failure.message}")
    if steps := {step for result in done.results for step in result["steps"]}:
        say(f"the nodes had the state of step {max(steps)} in memory, and have written it as a checkpoint")


def share_checkpoints(run: Supervision) -> None:
    """Copy the run's checkpoints to all nodes. Release the nodes if this fails."""
    share: Callable[[], None] | None = getattr(run.nodes, "share_checkpoints", None)
    if share is None:
        return
    try:
        share()
    except (TargetError, EngineError) as error:
        say(f"{error} The run takes its nodes again.")
        give_nodes_back(run)


def _note_not_fetched(run: Supervision, text: str) -> None:
    with contextlib.suppress(OSError, PacelineError):
        name = f"{NOT_FETCHED}_{len(run.record.attempts)}" if len(run.record.attempts) > 1 else NOT_FETCHED
        tags_and_properties.add_properties(run.folder.notes, {name: text})


def settle_links(run: Supervision, outcome: Outcome) -> None:
    """Replace links in outputs by their targets, and report the files not kept.

    Do nothing for an interrupted run, because another attempt may continue in its working directory.
    """
    if outcome.stopped == "interrupted" or not run.record.attempts:
        return
    try:
        # Move the outputs first: the next call replaces links, and the moved files may be links or their targets.
        work_dir.rescue_outputs(run.folder)
        excluded_files.settle(run.folder)
    except OSError as error:
        say(f"a link to a file that does not outlive the run could not be replaced by it: {error}")
    _note_left_out(run, excluded_files.find(run.folder))


def _note_left_out(run: Supervision, found: Iterable[Mapping[str, str]]) -> None:
    known = {one["name"] for one in run.left_out}
    new = [dict(one) for one in found if one["name"] not in known]
    for one in new[: excluded_files.LIMIT]:
        say(f"left out: {excluded_files.text(one)}")
    if len(new) > excluded_files.LIMIT:
        say(f"left out: {len(new) - excluded_files.LIMIT} names more")
    run.left_out += new


def with_outputs_stored(run: Supervision, outcome: Outcome) -> Outcome:
    """Store the run's outputs. Return the outcome, including a failure to store.

    Nothing is stored if the run was canceled or interrupted.
    """
    if (
        not any(reference.is_output for reference in run.job.inputs)
        or not run.record.attempts
        or outcome.stopped == "interrupted"
    ):
        return outcome
    if outcome.stopped == "cancel":
        say(f"canceled: outputs are not stored; they are in {run.folder.uploads}")
        return outcome
    run.to(states.FINALIZING)
    if run.nodes is None or run.seen is None or not run.seen.is_shared or run.nodes.lost():
        done = from_here(run, "store")  # the nodes' files are on this machine already
    else:
        done = on_nodes(run, "store", [0], run.nodes, run.seen, run.cancel_reason)
    if done.results:
        stored = dict(done.results[0])
        _note_left_out(run, stored.pop("left_out", ()))
        data = run_data.read_data(run.folder)
        run_data.write_data(run.folder, {"inputs": data["inputs"], "outputs": stored.get("outputs", data["outputs"])})
    if done.stopped:
        say(f"canceled while outputs were being stored; what is left of them is in {run.folder.uploads}")
    if done.stopped and outcome.failure is None:
        return dataclasses.replace(outcome, stopped=done.stopped)
    if done.failure is not None:
        message = f"{done.failure.message} The files that are not stored are in {str(run.folder.uploads)!r}."
        say(message)
        failure = dataclasses.replace(done.failure, message=message)
        return outcome if outcome.failure or outcome.stopped else dataclasses.replace(outcome, failure=failure)
    if outcome.failure is not None or outcome.stopped is not None:
        return outcome
    if incomplete := _incomplete(run):
        return dataclasses.replace(outcome, failure=incomplete)
    _register(run)
    return outcome


def _register(run: Supervision) -> None:
    # For a run that came from another machine, that machine registers the datasets when it gets the final record.
    if not any(reference.registered for reference in run.job.inputs) or run.folder.carried.exists():
        return
    from paceline.data.datasets.dataset import register_outputs

    made, said = register_outputs(run.job.inputs, run.folder.path.parents[1])
    run_data.note_datasets(run.folder, made)
    for text in said:
        run.warn(text)


def _incomplete(run: Supervision) -> FailureReport | None:
    missing: dict[str, list[str]] = {}
    for one in run.left_out:
        top, _, name = one["name"].partition("/")
        if top == run.folder.uploads.name:
            output, _, inner = name.partition("/")
            missing.setdefault(output, []).append(excluded_files.text({**one, "name": inner or "."}))
    if not missing:
        return None
    texts = []
    for output, found in missing.items():
        more = f", and {len(found) - _NAMED} names more" if len(found) > _NAMED else ""
        texts.append(f"Output {output!r} is not complete: {'; '.join(found[:_NAMED])}{more}.")
    return FailureReport(
        cause="data",
        message=f"{' '.join(texts)} Its other files are stored. Let the script write a copy instead of a link, remove "
        "special files, and submit again.",
        attempt=len(run.record.attempts) or None,
        see=shlex.join(["paceline", "show", run.record.run_id]),
    )
