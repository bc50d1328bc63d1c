"""One attempt on the nodes that a run holds: what its workers are told, their logs, and their watch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from paceline.errors import JobError
from paceline.job.plan import Launch
from paceline.launchers import environment, get_launcher
from paceline.runs import states
from paceline.runs.containers import remove_containers
from paceline.runs.folder import RunFolder
from paceline.supervisor.attempt import AttemptWatch, Outcome
from paceline.supervisor.in_containers import wrapped
from paceline.supervisor.preparing import remove_on_nodes
from paceline.supervisor.supervision import Supervision
from paceline.system import processes


def attempt(run: Supervision, number: int) -> Outcome:
    """Start all workers once and see them to their ends; none is left when this returns."""
    launch = _launch(run, number)
    if (reason := run.stop_reason()) is not None:
        return Outcome(stopped=reason)
    assert run.nodes is not None
    shells = [_shell(run.nodes.shell(node.node_rank)) for node in launch.nodes]
    commands = [
        environment.with_paths(command, launch, shells[command.node_rank])
        for command in get_launcher(run.job.launcher).commands(launch)
    ]
    _make_logs(run.folder, launch)
    run.nodes.begin(launch.attempt)
    run.open_attempt(launch)
    watch = AttemptWatch(
        launch,
        run.folder,
        run.nodes,
        run.wake,
        shells=shells,
        stop=run.stop_reason,
        on_running=lambda: run.to(states.RUNNING),
        keeps_limits=run.seen is not None and run.seen.is_shared,
        warn=run.warn,
    )
    all_ended = False
    try:
        outcome = watch.run(wrapped(commands, launch, shells))
        all_ended = not (outcome.failure or outcome.stopped or any(outcome.exit_codes.values()))
        return outcome
    finally:
        remove_containers(run.job, run.record.run_id, all_ended=all_ended)
        remove_on_nodes(run)


def _launch(run: Supervision, number: int) -> Launch:
    assert run.nodes is not None
    assert run.seen is not None
    workspace = run.folder.path.parent.parent
    if missing := sorted(set(run.job.secrets) - set(run.secrets)):
        raise JobError(
            f"the values of {', '.join(missing)} are not in the run's folder any more, where submission has put them "
            f"({run.folder.secrets.name}). Submit the run again: paceline rerun {run.record.run_id}."
        )
    return Launch(
        job=run.job.with_values(run.secrets),
        run_id=run.record.run_id,
        experiment=run.record.experiment,
        workspace_name=workspace.parent.name if workspace.name == ".paceline" else workspace.name,
        run_dir=run.seen.run_dir,
        work_dir=run.seen.work_dir,
        scratch_dir=run.seen.scratch_dir,
        library_dir=run.seen.library_dir,
        nodes=run.nodes.nodes,
        prepared=run.prepared,
        ports=run.nodes.ports,
        attempt=number,
        remote_shell=run.seen.remote_shell,
        starter=run.seen.starter,
        # New for each attempt, and nowhere but in the environment of its workers.
        secret=secrets.token_hex(32),
    )


def _shell(of_node: Mapping[str, str] | None) -> dict[str, str]:
    """The environment that a node's workers' own is laid over: the node's, or the submitting shell's."""
    if of_node is not None:
        return processes.with_home(environment.inherited(of_node))
    shell = processes.with_home(environment.inherited(os.environ))
    del shell["PYTHONPATH"]  # the supervisor's
    if theirs := os.environ.get("PACELINE_SHELL_PYTHONPATH"):
        shell["PYTHONPATH"] = theirs
    return shell


def _make_logs(folder: RunFolder, launch: Launch) -> None:
    """Empty logs for the attempt, and `logs/rank_<n>.log` as links to them."""
    folder.attempt(launch.attempt).mkdir(parents=True, exist_ok=True)
    for place in launch.places:
        folder.rank_log(launch.attempt, place.rank).touch()
        live = folder.live_log(place.rank)
        beside = live.with_name(f".{live.name}")
        beside.unlink(missing_ok=True)  # of a supervisor that was killed, in a run that its engine has started again
        beside.symlink_to(os.path.relpath(folder.rank_log(launch.attempt, place.rank), folder.logs))
        os.replace(beside, live)
