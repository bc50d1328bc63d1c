"""Get nodes before an attempt, and on each of them the run's folder, its environment and its data; give them back after it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import (
    EngineError,
    EnvironmentBuildError,
    EnvironmentSpecError,
    TargetError,
    TransferError,
    UserError,
)
from paceline.job.job import Job
from paceline.job.plan import NodeSetup, RemotePaths
from paceline.runs import states, work_dir
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport, logs_command
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.run_data import link_inputs, unlink_inputs
from paceline.supervisor.nodes import NodeOutcome, from_here, on_nodes
from paceline.supervisor.supervision import Outcome, Supervision
from paceline.system import linked
from paceline.system.detached_process import library_dir
from paceline.system.files import read_json, write_json
from paceline.targets import Nodes


def hold_nodes(run: Supervision) -> Outcome | None:
    """Get nodes and make them ready; None once they are, else how the run ends.

    Raises:
        TargetError: the job can't have them. EngineError: it can't have them now, or not any more.
    """
    assert run.target is not None
    run.to(states.QUEUED, owner=run.owner())
    nodes = run.target.wait_for_nodes(run.wanted, run.folder.path, run.waiting)
    if nodes is None:
        return Outcome(stopped=run.stop_reason() or "cancel")
    # From here on `give_nodes_back` gives them back, whatever fails below.
    run.nodes = nodes
    run.to(states.PREPARING, waiting_for=None, scratch_dir=str(run.folder.scratch))
    try:
        run.seen = nodes.send(run.folder, library_dir(run.folder.path.parent.parent))
        if run.seen.is_shared and not run.folder.work.exists():
            work_dir.make(run.folder, sent=_sent(run, run.seen))
    except (TargetError, EngineError) as error:
        cause = "data" if isinstance(error, TransferError) else "node_lost" if nodes.lost() else "prepare"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)), lost=len(nodes.lost()))
    except (UserError, TransferError) as error:
        # What the job names on this machine is not there to be sent.
        cause = "environment" if isinstance(error, EnvironmentSpecError) else "data"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))
    except OSError as error:
        return Outcome(failure=_report(run.record, error))
    done, run.prepared = _prepare(run, nodes, run.seen)
    if done.failure is not None or done.stopped is not None:
        return Outcome(failure=done.failure, stopped=done.stopped, lost=len(nodes.lost()))
    if run.seen.is_shared:
        unlink_inputs(run.job, run.folder)  # of an attempt on other nodes
        link_inputs(run.job, run.prepared[0], run.folder.work)
    run.start_clock()
    return None


def _sent(run: Supervision, seen: RemotePaths) -> dict[str, Path | None]:
    """Return what the working directory has in place of links to the user's folders, which the nodes do not see."""
    if run.folder.carried.exists():
        # Of runs that were brought to this machine alone: a supervisor is to load fast.
        from paceline.remote.staging.stage_in import as_here

        return as_here(run.folder).linked()
    if seen.sees_source:
        return {}
    found: dict[str, Path | None] = {}
    source = Path(run.record.source_directory or ".")
    for one in linked.read(run.folder.linked):
        if one.is_sent and one.is_folder:
            found[one.path] = None
        for name, path in (
            linked.sent_files(source, one.path, named=linked.is_named(one.path, run.job.send)) if one.is_sent else ()
        ):
            found[f"{one.path}/{name}" if one.is_folder else one.path] = path
    return found


def clean_nodes(run: Supervision) -> None:
    """Let nodes elsewhere drop what they have of the run in their caches and container engines."""
    nodes, seen = run.nodes, run.seen
    if nodes is None or seen is None or nodes.shell(0) is None or nodes.lost():
        return
    if run.job.environment.docker_image or run.job.inputs:
        done = on_nodes(run, "clean", range(len(nodes.nodes)), nodes, seen)
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
        on_nodes(run, "remove", ranks, nodes, seen)


def give_nodes_back(run: Supervision) -> None:
    """End what is left on the nodes, and hold none. Harmless the second time."""
    nodes, run.nodes = run.nodes, None
    run.stop_clock()
    if nodes is not None:
        nodes.close()


def _prepare(run: Supervision, nodes: Nodes, seen: RemotePaths) -> tuple[NodeOutcome, tuple[NodeSetup, ...]]:
    """Make environment and data ready on each node; nothing is started where the job needs neither.

    On nodes elsewhere there is more to do: an Open MPI is found there, and the workers' folder made where it is not shared.
    """
    job, is_here = run.sized, nodes.shell(0) is None
    needs_more = not is_here and (job.launcher == "mpi" or not seen.is_shared)
    if not (needs_more or job.environment.needs_build or job.environment.docker_image or job.inputs):
        return NodeOutcome(), (NodeSetup(python=job.environment.python or seen.python),) * job.node_count
    try:
        # Held before the nodes make any: a view without a living holder is removed by whoever uses the cache next.
        run.held.enter_context(_views(job, run.folder.run_id))
    except UserError as error:
        return NodeOutcome(failure=FailureReport(cause="data", message=str(error))), ()
    if not seen.is_shared and any(reference.is_output for reference in job.inputs):
        # What comes back from nodes elsewhere is stored from this machine, so it is this one that has to be able to, before an
        # hour of work.
        looked = from_here(run, "check")
        if looked.failure is not None or looked.stopped is not None:
            return looked, ()
    while True:
        done = on_nodes(run, "prepare", range(job.node_count), nodes, seen, run.stop_reason)
        if not done.results or not job.environment.needs_build or not seen.is_shared:
            break
        try:
            run.held.enter_context(_hold_environment(run.folder))
            break
        except EnvironmentBuildError as error:
            # The nodes hold it only while they build. Pruned between their end and this lock, it is gone.
            say(f"{error} It is built again.")
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


@contextlib.contextmanager
def _views(job: Job, run_id: str) -> Iterator[None]:
    """Keep the folders in which the run finds its data while this lasts, and remove them after it."""
    if all(reference.is_output for reference in job.inputs):
        yield
        return
    from paceline.data.transfer.cache import DataCache

    cache = DataCache()
    cache.drop_dead_views()  # of runs that were killed
    held = cache.hold_view(run_id)
    try:
        yield
    finally:
        # Removed under the lock: let go first, it might have been taken for a killed run's and be removed by two.
        cache.drop_views(run_id)
        os.close(held)


def _hold_environment(folder: RunFolder) -> contextlib.AbstractContextManager[object]:
    """Keep `paceline env prune` from the run's environment while this lasts."""
    from paceline.environments.built import Built
    from paceline.environments.store import EnvironmentStore

    kept, environments = read_json(folder.environment), folder.path.parent.parent / "environments"
    if Path(kept["prefix"]).is_relative_to(environments / "images"):
        from paceline.containers import hold_layer

        return hold_layer(environments / "images", kept["key"])
    return EnvironmentStore(environments).hold(Built.from_json(kept))
