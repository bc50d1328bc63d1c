"""Acquire nodes for an attempt, prepare files, environment and data on each node, and release the nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

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
from paceline.runs.run_data import RunData, link_inputs, unlink_inputs, write_data
from paceline.supervisor.nodes import NodeOutcome, from_here, on_nodes
from paceline.supervisor.supervision import Outcome, Supervision
from paceline.system import linked
from paceline.system.detached_process import library_dir
from paceline.system.files import is_full, read_json
from paceline.targets import Nodes


def hold_nodes(run: Supervision) -> Outcome | None:
    """Acquire and prepare the run's nodes. Return the outcome on failure, else None.

    Raises:
        TargetError: The target can never provide these nodes for the job.
        EngineError: The engine, such as Slurm, can't provide the nodes now, or has taken them back.
    """
    assert run.target is not None
    run.to(states.QUEUED, owner=run.owner())
    nodes = run.target.wait_for_nodes(run.wanted, run.folder.path, run.waiting)
    if nodes is None:
        return Outcome(stopped=run.stop_reason() or "cancel")
    # Set this before `send`, which may fail: the end of the run releases the nodes in `run.nodes`.
    run.nodes = nodes
    run.wake.heed(nodes)
    run.to(states.PREPARING, waiting_for=None, scratch_dir=str(run.folder.scratch))
    run.tell_once("allocated")
    try:
        run.seen = nodes.send(run.folder, library_dir(run.folder.path.parent.parent))
        if run.seen.is_shared and not run.folder.work.exists():
            work_dir.make(run.folder, sent=_sent(run, run.seen))
    except (TargetError, EngineError) as error:
        cause = "data" if isinstance(error, TransferError) else "node_lost" if nodes.lost() else "prepare"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)), lost=len(nodes.lost()))
    except (UserError, TransferError) as error:
        # These errors mean that local paths in the job do not exist on the supervisor's machine.
        cause = "environment" if isinstance(error, EnvironmentSpecError) else "data"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))
    except OSError as error:
        return Outcome(failure=_report(run.record, error))
    done, run.prepared = _prepare(run, nodes, run.seen)
    if done.failure is not None or done.stopped is not None:
        return Outcome(failure=done.failure, stopped=done.stopped, lost=len(nodes.lost()))
    if run.seen.is_shared:
        unlink_inputs(run.job, run.folder)  # remove links that an attempt on other nodes left
        link_inputs(run.job, run.prepared[0], run.folder.work)
    run.start_clock()
    return None


def _sent(run: Supervision, seen: RemotePaths) -> dict[str, Path | None]:
    """Return {path in the source folder: local file} of files to send to remote nodes.

    These files are not in the snapshot, and the nodes can't link to them. For an empty folder, the local file is None.
    """
    if run.folder.carried.exists():
        # The import is slow, and only runs that came from another machine need it.
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
    """Remove the run's data from the caches and container engines of remote nodes."""
    nodes, seen = run.nodes, run.seen
    if nodes is None or seen is None or nodes.shell(0) is None or nodes.lost():
        return
    if run.job.environment.docker_image or run.job.inputs:
        done = on_nodes(run, "clean", range(len(nodes.nodes)), nodes, seen)
        if done.failure is not None:
            say(done.failure.message)


def remove_on_nodes(run: Supervision) -> None:
    """Remove the run's containers on remote nodes."""
    nodes, seen = run.nodes, run.seen
    if nodes is None or seen is None or nodes.shell(0) is None:
        return
    lost = nodes.lost()
    containers = {rank: one.container for rank, one in enumerate(run.prepared) if rank not in lost}
    ranks = [rank for rank, found in containers.items() if found and found["engine"]["kind"] == "docker"]
    if ranks:
        on_nodes(run, "remove", ranks, nodes, seen)


def give_nodes_back(run: Supervision) -> None:
    """End all processes on the nodes, and release the nodes. Later calls do nothing."""
    nodes, run.nodes = run.nodes, None
    run.stop_clock()
    if nodes is not None:
        nodes.close()


def _prepare(run: Supervision, nodes: Nodes, seen: RemotePaths) -> tuple[NodeOutcome, tuple[NodeSetup, ...]]:
    """Prepare environment and data on each node, if the job needs any of them.

    On remote nodes, also look for Open MPI if the job needs it. Nodes that do not share the supervisor's folder also
    create the working directory.
    """
    job, is_here = run.sized, nodes.shell(0) is None
    needs_more = not is_here and (job.launcher == "mpi" or not seen.is_shared)
    if not (needs_more or job.environment.needs_build or job.environment.docker_image or job.inputs):
        return NodeOutcome(), (NodeSetup(python=job.environment.python or seen.python),) * job.node_count
    try:
        # Lock the run's views (folders of links to cached files) before nodes create them: the cache removes unlocked views.
        run.held.enter_context(_views(job, run.folder.run_id))
    except UserError as error:
        return NodeOutcome(failure=FailureReport(cause="data", message=str(error))), ()
    if not seen.is_shared and any(reference.is_output for reference in job.inputs):
        # This machine stores the outputs of remote nodes, so check its credentials before the workers train for hours.
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
            # The nodes lock the environment only while they build it, so another process may have removed the environment since.
            say(f"{error} It is built again.")
    if done.results and job.inputs:
        outputs = [reference.to_json() for reference in job.inputs if reference.is_output]
        inputs = [data for result in done.results for data in result["inputs"]]
        write_data(run.folder, cast("RunData", {"inputs": inputs, "outputs": outputs}))
    return done, tuple(NodeSetup.from_json(one["prepared"]) for one in done.results)


def _report(record: RunRecord, error: OSError) -> FailureReport:
    return FailureReport(
        cause="disk" if is_full(error) else "prepare",
        message=f"The working directory could not be prepared: {error.strerror}: {error.filename!r}.",
        see=logs_command(record.run_id),
    )


@contextlib.contextmanager
def _views(job: Job, run_id: str) -> Iterator[None]:
    if all(reference.is_output for reference in job.inputs):
        yield
        return
    from paceline.data.transfer.cache import DataCache

    cache = DataCache()
    cache.drop_dead_views()  # remove views (folders of links) of killed runs
    held = cache.hold_view(run_id)
    try:
        yield
    finally:
        # Remove this run's folder of links before releasing its lock: else another process may do so at the same time.
        cache.drop_views(run_id)
        os.close(held)


def _hold_environment(folder: RunFolder) -> contextlib.AbstractContextManager[object]:
    from paceline.environments.built import Built
    from paceline.environments.store import EnvironmentStore

    kept, environments = read_json(folder.environment), folder.path.parent.parent / "environments"
    if Path(kept["prefix"]).is_relative_to(environments / "images"):
        from paceline.containers import hold_layer

        return hold_layer(environments / "images", kept["key"])
    return EnvironmentStore(environments).hold(Built.from_json(kept))
