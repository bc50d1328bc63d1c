"""Run one attempt on a run's nodes: start the workers, and watch them until they end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import JobError
from paceline.job.plan import Launch
from paceline.launchers import environment, get_launcher
from paceline.runs import states
from paceline.runs.driver_log import say
from paceline.runs.store import remove_containers
from paceline.runs.work_dir import place
from paceline.supervisor.in_containers import wrapped
from paceline.supervisor.logs import make_logs
from paceline.supervisor.node_watches import ResizeWatch
from paceline.supervisor.prepare import remove_on_nodes
from paceline.supervisor.replacing import Replacing
from paceline.supervisor.spares import spare_path
from paceline.supervisor.supervision import Outcome, Supervision
from paceline.supervisor.watch import WorkerWatch
from paceline.system import processes
from paceline.targets.base import Elastic


def run_attempt(run: Supervision, number: int) -> Outcome:
    """Start all workers once, and watch them until all have ended. Return the outcome.

    number: The number of the attempt, from 1.

    Raises:
        JobError: The values of the job's secrets have been removed.
        LauncherError: The launcher can't use the nodes or the container image, for example because Open MPI is missing.
    """
    launch = _with_spares(run, _launch(run, number))
    if (reason := run.stop_reason()) is not None:
        return Outcome(stopped=reason)
    assert run.nodes is not None
    shells = [_shell(run.nodes.shell(node.node_rank)) for node in launch.nodes]
    commands = [
        environment.with_paths(command, launch, shells[command.node_rank])
        for command in get_launcher(run.job.launcher).commands(launch)
    ]
    # Create the logs before `begin`, after which nodes send log lines. Readers open the logs once the record has the attempt.
    make_logs(run.folder, launch)
    run.nodes.begin(launch.attempt)
    run.open_attempt(launch)
    run.spares.begin(launch, run.nodes, shells)
    watch = WorkerWatch(
        launch,
        run.folder,
        run.nodes,
        run.wake,
        shells=shells,
        stop=run.stop_reason,
        on_running=lambda: _note_running(run),
        keeps_limits=run.seen is not None and run.seen.is_shared,
        warn=run.warn,
        note_hang=run.note_hang,
        look_at_metrics=lambda: run.alerts.look(run.record),
        resize=_resize_watch(run, launch),
        spares=run.spares,
        replacing=_replacing(run, launch, shells),
    )
    all_ended = False
    try:
        outcome = watch.run(wrapped(commands, launch, shells))
        all_ended = not (outcome.failure or outcome.stopped or any(outcome.exit_codes.values()))
        return outcome
    finally:
        # Remove docker's containers explicitly: they are children of docker's daemon, and not of this process.
        remove_containers(run.job, run.record.run_id, all_ended=all_ended)
        remove_on_nodes(run)


def _with_spares(run: Supervision, launch: Launch) -> Launch:
    assert run.nodes is not None
    assert run.seen is not None
    path, why = spare_path(launch, run.seen, is_here=run.nodes.shell(0) is None)
    if why and launch.attempt == 1:
        say(why)
    is_apart = "%" in path and len(launch.nodes) > 1
    return replace(launch, spare=path, states_key=run.spares.keepers.key if is_apart else "")


def _note_running(run: Supervision) -> None:
    run.has_run = True
    run.to(states.RUNNING)
    run.tell_once("start")


def _replacing(run: Supervision, launch: Launch, shells: Sequence[Mapping[str, str]]) -> Replacing | None:
    assert run.nodes is not None
    if run.job.on_failure != "replace":
        return None
    return Replacing(launch, run.folder, run.nodes, shells, run.replacements_left, run.note_replacement)


def _resize_watch(run: Supervision, launch: Launch) -> ResizeWatch | None:
    target: object = run.target
    nodes = run.nodes
    if run.job.node_range is None or nodes is None or not isinstance(target, Elastic):
        return None
    return ResizeWatch(
        launch,
        nodes,
        run.elastic_s,
        more=lambda: target.nodes_to_be_had(run.job, run.folder.path, nodes),
        note=run.note_growth,
    )


def _launch(run: Supervision, number: int) -> Launch:
    assert run.nodes is not None
    assert run.seen is not None
    workspace = run.folder.path.parent.parent
    at = place(run.record.to_json(), is_shared=run.seen.is_shared)
    if missing := sorted(set(run.job.secrets) - set(run.secrets)):
        raise JobError(
            f"the values of {', '.join(missing)} are not in the run's folder any more, where submission has put them "
            f"({run.folder.secrets.name}). Submit the run again: paceline rerun {run.record.run_id}."
        )
    return Launch(
        job=run.sized.with_values(run.secrets),
        run_id=run.record.run_id,
        experiment=run.record.experiment,
        workspace_name=workspace.parent.name if workspace.name == ".paceline" else workspace.name,
        run_dir=run.seen.run_dir,
        work_dir=run.seen.work_dir / at.directory,
        source_dir=run.seen.work_dir / at.copy,
        original_dir=Path(at.source) if at.copy else None,
        scratch_dir=run.seen.scratch_dir,
        library_dir=run.seen.library_dir,
        nodes=run.nodes.nodes,
        prepared=run.prepared,
        ports=run.nodes.ports,
        attempt=number,
        remote_shell=run.seen.remote_shell,
        starter=run.seen.starter,
        ends_at=run.ends_at,
        # Draw a new secret for each attempt, by which its processes authenticate each other over the network.
        secret=os.urandom(32).hex(),
    )


def _shell(of_node: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables that workers inherit: from the node (`of_node`) or the submitting shell."""
    shell = processes.shell_environment() if of_node is None else of_node
    return processes.with_home(environment.inherited(shell))
