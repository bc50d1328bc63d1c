"""Before an attempt: nodes, and on each of them the run's folder, its environment and its data. And giving them back."""

from __future__ import annotations

import errno

from paceline.errors import (
    EngineError,
    EnvironmentBuildError,
    EnvironmentSpecError,
    TargetError,
    TransferError,
    UserError,
)
from paceline.job.plan import NodeSetup, RemotePaths
from paceline.runs import states, work_dir
from paceline.runs.failure import FailureReport, logs_command
from paceline.runs.input_links import link_inputs, unlink_inputs
from paceline.runs.record import RunRecord
from paceline.supervisor.attempt import Outcome
from paceline.supervisor.driver_log import say
from paceline.supervisor.inputs import hold_environment, views
from paceline.supervisor.nodes import NodeOutcome, on_nodes
from paceline.supervisor.storing import from_here
from paceline.supervisor.supervision import Supervision
from paceline.system.files import write_json
from paceline.system.library import library_dir
from paceline.targets import Nodes


def hold_nodes(run: Supervision) -> Outcome | None:
    """Get nodes and make them ready; None once they are, else how the run ends.

    Raises:
        TargetError: the job can't have them. EngineError: it can't have them now, or not any more.
    """
    assert run.target is not None
    run.to(states.QUEUED, owner=run.owner())
    nodes = run.target.wait_for_nodes(run.job, run.folder.path, run.waiting)
    if nodes is None:
        return Outcome(stopped=run.stop_reason() or "cancel")
    run.nodes = nodes
    run.to(states.PREPARING, waiting_for=None, scratch_dir=str(run.folder.scratch))
    try:
        run.seen = nodes.send(run.folder, library_dir(run.folder.path.parent.parent))
        if run.seen.is_shared and not run.folder.work.exists():
            work_dir.make(run.folder)
    except (TargetError, EngineError) as error:
        cause = "node_lost" if nodes.lost() else "prepare"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))
    except (UserError, TransferError) as error:
        # What the job names on this machine is not there to be sent.
        cause = "environment" if isinstance(error, EnvironmentSpecError) else "data"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))
    except OSError as error:
        return Outcome(failure=_report(run.record, error))
    done, run.prepared = _prepare(run, nodes, run.seen)
    if done.failure is not None or done.stopped is not None:
        return Outcome(failure=done.failure, stopped=done.stopped)
    if run.seen.is_shared:
        unlink_inputs(run.job, run.folder)  # of an attempt on other nodes
        link_inputs(run.job, run.prepared[0], run.folder.work)
    run.start_clock()
    return None


def clean_nodes(run: Supervision) -> None:
    """Let nodes elsewhere drop what they have of the run in their caches and container engines."""
    nodes, seen = run.nodes, run.seen
    if nodes is None or seen is None or nodes.shell(0) is None or nodes.lost():
        return
    if run.job.environment.docker_image or run.job.inputs:
        ranks = range(run.job.node_count)
        done = on_nodes("clean", ranks, folder=run.folder, nodes=nodes, seen=seen, wake=run.wake, stop=lambda: None)
        if done.failure is not None:
            say(done.failure.message)


def remove_on_nodes(run: Supervision) -> None:
    """Let nodes elsewhere end containers whose client is gone: those of docker's daemon are nobody's children."""
    nodes, seen = run.nodes, run.seen
    if nodes is None or seen is None or nodes.shell(0) is None:
        return
    containers = {rank: one.container for rank, one in enumerate(run.prepared) if rank not in nodes.lost()}
    ranks = [rank for rank, found in containers.items() if found and found["engine"]["kind"] == "docker"]
    if ranks:
        on_nodes("remove", ranks, folder=run.folder, nodes=nodes, seen=seen, wake=run.wake, stop=lambda: None)


def give_nodes_back(run: Supervision) -> None:
    """End what is left on the nodes, and hold none. Harmless the second time."""
    nodes, run.nodes = run.nodes, None
    run.stop_clock()
    if nodes is not None:
        nodes.close()


def _prepare(run: Supervision, nodes: Nodes, seen: RemotePaths) -> tuple[NodeOutcome, tuple[NodeSetup, ...]]:
    """Environment and data, on each node; nothing is started where the job needs neither.

    On nodes elsewhere there is more to do: an Open MPI is found there, and the workers' folder made where it is not shared.
    """
    job, is_here = run.job, nodes.shell(0) is None
    needs_more = not is_here and (job.launcher == "mpi" or not seen.is_shared)
    if not (needs_more or job.environment.needs_build or job.environment.docker_image or job.inputs):
        return NodeOutcome(), (NodeSetup(python=job.environment.python or seen.python),) * job.node_count
    try:
        # From here on the views of the run's data are somebody's.
        run.held.enter_context(views(job, run.folder.run_id))
    except UserError as error:
        return NodeOutcome(failure=FailureReport(cause="data", message=str(error))), ()
    if not seen.is_shared and any(reference.is_output for reference in job.inputs):
        looked = from_here(run, "check")
        if looked.failure is not None or looked.stopped is not None:
            return looked, ()
    while True:
        ranks, stop = range(job.node_count), run.stop_reason
        done = on_nodes("prepare", ranks, folder=run.folder, nodes=nodes, seen=seen, wake=run.wake, stop=stop)
        if not done.results or not job.environment.needs_build or not seen.is_shared:
            break
        try:
            run.held.enter_context(hold_environment(run.folder))
            break
        except EnvironmentBuildError as error:
            say(f"{error} It is built again.")  # pruned in the moment between
    if done.results and job.inputs:
        told = {
            "inputs": [found for one in done.results for found in one["inputs"]],
            "outputs": [reference.to_json() for reference in job.inputs if reference.is_output],
        }
        write_json(run.folder.data, told)
    return done, tuple(NodeSetup.from_json(one["prepared"]) for one in done.results)


def _report(record: RunRecord, error: OSError) -> FailureReport:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return FailureReport(
        cause="disk" if full else "prepare",
        message=f"The working directory could not be prepared: {error.strerror}: {error.filename!r}.",
        see=logs_command(record.run_id),
    )
