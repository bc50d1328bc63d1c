"""See one run through: queue, prepare, attempt after attempt, finalize."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from paceline import processes
from paceline.errors import EnvironmentBuildError, TargetError, UserError
from paceline.job import Job
from paceline.launchers import environment, get_launcher
from paceline.library import library_dir
from paceline.plan import Launch, Prepared
from paceline.runs import states, store, work_dir
from paceline.runs.failure import (
    EXIT_CANCELED,
    EXIT_PREEMPTED,
    EXIT_TIME_LIMIT,
    FailureReport,
    logs_command,
    signal_name,
)
from paceline.runs.files import read_json, write_json
from paceline.runs.folder import RunFolder
from paceline.runs.input_links import link_inputs, unlink_inputs
from paceline.runs.record import Attempt, RunRecord, utc_now
from paceline.supervisor.attempt import AttemptWatch, Outcome
from paceline.supervisor.driver_log import say
from paceline.supervisor.in_containers import remove_containers, wrapped
from paceline.supervisor.inputs import hold_environment, views
from paceline.supervisor.nodes import Done, on_nodes
from paceline.supervisor.wake import Wake
from paceline.targets import Nodes, Seen, Target, target_of_run
from paceline.targets.local_nodes import LocalNodes

#: Causes after which another attempt may do better. A script's own exception is not one: it would come again.
RETRIED = frozenset({"killed", "launcher", "node_lost", "preempted", "port"})
#: Causes after which the nodes are asked for anew.
_NODES_GONE = frozenset({"node_lost", "preempted"})


def supervise(folder: RunFolder) -> None:
    """See the run of this folder to its end. The caller holds the run's lock. Never raises."""
    supervisor = _Supervisor(folder)
    try:
        supervisor.run()
    except BaseException as error:
        supervisor.fail_internally(error)


class _Supervisor:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._wake = Wake()
        self._record: RunRecord = store.stored(folder)
        assert self._record.job is not None, "only submitted runs have a supervisor"
        self._job: Job = self._record.job
        self._target: Target = target_of_run(folder.path)
        self._nodes: Nodes | None = None
        self._seen: Seen | None = None
        self._prepared: tuple[Prepared, ...] = ()
        self._deadline: float | None = None
        self._held = contextlib.ExitStack()

    def run(self) -> None:
        try:
            outcome = self._attempts()
        except UserError as error:
            # What only the nodes could show: the job can't have them, or the environment that was made has no mpirun.
            cause = "engine" if isinstance(error, TargetError) else "launcher"
            outcome = Outcome(failure=FailureReport(cause=cause, message=str(error)))
        self._finish(self._with_outputs_stored(outcome))

    # --- the attempts

    def _attempts(self) -> Outcome:
        """One after the other, each on the nodes of the one before, unless these are gone."""
        self._close_attempt(Outcome(stopped="preempted"))
        number = len(self._record.attempts)  # not 0 where the engine has put the job back into its queue
        if number and number > self._job.max_restarts:
            return Outcome(failure=_interrupted_report(self._record))
        tried = number
        while True:
            tried += 1
            outcome = self._hold_nodes() if self._nodes is None else None
            if outcome is None:
                number += 1
                outcome = self._brought_home(self._attempt(self._launch(number)))
                self._close_attempt(outcome)
            failure = outcome.failure
            if failure is None or failure.cause not in self._retried() or tried > self._job.max_restarts:
                return outcome
            say(f"attempt {tried} failed ({failure.cause}): {failure.message} Starting the next.")
            if failure.cause in _NODES_GONE:
                self._give_nodes_back()

    def _retried(self) -> frozenset[str]:
        return RETRIED | ({"exception", "memory"} if self._job.restart_on_exception else set())

    def _hold_nodes(self) -> Outcome | None:
        """Get nodes and make them ready; None once they are, else how the run ends."""
        self._to(states.QUEUED, owner=self._owner())
        nodes = self._target.wait_for_nodes(self._job, self._folder.path, self._waiting)
        if nodes is None:
            return Outcome(stopped=self._stop_reason() or "cancel")
        self._nodes = nodes
        self._to(states.PREPARING, waiting_for=None, scratch_dir=str(self._folder.scratch))
        try:
            self._seen = nodes.send(self._folder, library_dir(self._folder.path.parent.parent))
            if self._seen.is_shared and not self._folder.work.exists():
                work_dir.make(self._folder)
        except TargetError as error:
            cause = "node_lost" if nodes.lost() else "prepare"
            return Outcome(failure=FailureReport(cause=cause, message=str(error)))
        except OSError as error:
            return Outcome(failure=_prepare_report(self._record, error))
        done, self._prepared = self._prepare(nodes, self._seen)
        if done.failure is not None or done.stopped is not None:
            return Outcome(failure=done.failure, stopped=done.stopped)
        if self._job.max_run_duration_seconds is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._job.max_run_duration_seconds
        if self._seen.is_shared:
            link_inputs(self._job, self._prepared[0], self._folder.work)
        return None

    def _brought_home(self, outcome: Outcome) -> Outcome:
        """The outcome once the run's files are here, which is part of it."""
        assert self._nodes is not None
        try:
            self._nodes.fetch()
        except TargetError as error:
            say(str(error))
            if outcome.failure is None and outcome.stopped is None:
                return dataclasses.replace(outcome, failure=FailureReport(cause="data", message=str(error)))
        return outcome

    def _clean_nodes(self) -> None:
        """Let nodes elsewhere drop what they have of the run in their caches and container engines."""
        nodes, seen = self._nodes, self._seen
        if nodes is None or seen is None or nodes.shell(0) is None or nodes.lost():
            return
        if self._job.environment.docker_image or self._job.inputs:
            ranks = range(self._job.node_count)
            done = on_nodes(
                "clean", ranks, folder=self._folder, nodes=nodes, seen=seen, wake=self._wake, stop=lambda: None
            )
            if done.failure is not None:
                say(done.failure.message)

    def _give_nodes_back(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()

    # --- what runs once on each node

    def _prepare(self, nodes: Nodes, seen: Seen) -> tuple[Done, tuple[Prepared, ...]]:
        """Environment and data, on each node; nothing is started on this machine where the job needs neither."""
        job, is_here = self._job, nodes.shell(0) is None
        if is_here and not (job.environment.needs_build or job.environment.docker_image or job.inputs):
            return Done(), (Prepared(python=job.environment.python or seen.python),) * job.node_count
        try:
            # From here on the views of the run's data are somebody's.
            self._held.enter_context(views(job, self._folder.run_id))
        except UserError as error:
            return Done(failure=FailureReport(cause="data", message=str(error))), ()
        while True:
            done = self._on_nodes("prepare", range(job.node_count), nodes, seen)
            if not done.results or not job.environment.needs_build or not seen.is_shared:
                break
            try:
                self._held.enter_context(hold_environment(self._folder))
                break
            except EnvironmentBuildError as error:
                say(f"{error} It is built again.")  # pruned in the moment between
        if done.results and job.inputs:
            told = {
                "inputs": [found for one in done.results for found in one["inputs"]],
                "outputs": [reference.to_json() for reference in job.inputs if reference.is_output],
            }
            write_json(self._folder.data, told)
        return done, tuple(Prepared.from_json(one["prepared"]) for one in done.results)

    def _on_nodes(self, verb: str, ranks: Iterable[int], nodes: Nodes, seen: Seen) -> Done:
        stop = self._stop_reason if verb == "prepare" else self._cancel_reason
        return on_nodes(verb, ranks, folder=self._folder, nodes=nodes, seen=seen, wake=self._wake, stop=stop)

    def _with_outputs_stored(self, outcome: Outcome) -> Outcome:
        """The outcome once output folders are stored, which is part of it. A canceled run stores nothing."""
        if not any(reference.is_output for reference in self._job.inputs) or not self._record.attempts:
            return outcome
        if outcome.stopped == "cancel":
            say(f"canceled: outputs are not stored; they are in {self._folder.uploads}")
            return outcome
        self._to(states.FINALIZING)
        nodes, seen = self._nodes, self._seen
        if nodes is None or seen is None or not seen.is_shared or nodes.lost():
            # What the nodes had has been brought here.
            nodes = LocalNodes((), (), lambda: None)
            seen = nodes.send(self._folder, library_dir(self._folder.path.parent.parent))
        done = self._on_nodes("store", [0], nodes, seen)
        if done.results:
            told = read_json(self._folder.data) or {}
            write_json(self._folder.data, told | done.results[0])
        if done.stopped:
            say(f"canceled while outputs were being stored; what is left of them is in {self._folder.uploads}")
        if done.stopped and outcome.failure is None:
            return dataclasses.replace(outcome, stopped=done.stopped)
        if done.failure is not None:
            message = f"{done.failure.message} The files that are not stored are in {str(self._folder.uploads)!r}."
            say(message)
            failure = dataclasses.replace(done.failure, message=message)
            return outcome if outcome.failure or outcome.stopped else dataclasses.replace(outcome, failure=failure)
        return outcome

    def _attempt(self, launch: Launch) -> Outcome:
        if (reason := self._stop_reason()) is not None:
            return Outcome(stopped=reason)
        assert self._nodes is not None
        shells = [self._shell(self._nodes.shell(node.node_rank)) for node in launch.nodes]
        commands = [
            environment.with_paths(command, launch, shells[command.node_rank])
            for command in get_launcher(self._job.launcher).commands(launch)
        ]
        self._make_logs(launch)
        self._nodes.begin(launch.attempt)
        now = utc_now()
        attempt = Attempt(number=launch.attempt, started_utc=now, nodes=tuple(node.name for node in launch.nodes))
        self._to(
            states.STARTING,
            attempts=(*self._record.attempts, attempt),
            started_utc=self._record.started_utc or now,
        )
        watch = AttemptWatch(
            launch,
            self._folder,
            self._nodes,
            self._wake,
            shells=shells,
            stop=self._stop_reason,
            on_running=self._on_running,
        )
        try:
            return watch.run(wrapped(commands, launch, shells[0]))
        finally:
            remove_containers(self._job, self._record.run_id)

    def _launch(self, number: int) -> Launch:
        assert self._nodes is not None
        assert self._seen is not None
        workspace = self._folder.path.parent.parent
        return Launch(
            job=self._job,
            run_id=self._record.run_id,
            experiment=self._record.experiment,
            workspace_name=workspace.parent.name if workspace.name == ".paceline" else workspace.name,
            run_dir=self._seen.run_dir,
            work_dir=self._seen.work_dir,
            scratch_dir=self._seen.scratch_dir,
            library_dir=self._seen.library_dir,
            nodes=self._nodes.nodes,
            prepared=self._prepared,
            ports=self._nodes.ports,
            attempt=number,
            remote_shell=self._seen.remote_shell,
        )

    def _make_logs(self, launch: Launch) -> None:
        """Empty logs for the attempt, and `logs/rank_<n>.log` as links to them."""
        folder = self._folder
        folder.attempt(launch.attempt).mkdir(parents=True, exist_ok=True)
        for place in launch.places:
            folder.rank_log(launch.attempt, place.rank).touch()
            live = folder.live_log(place.rank)
            beside = live.with_name(f".{live.name}")
            beside.symlink_to(os.path.relpath(folder.rank_log(launch.attempt, place.rank), folder.logs))
            os.replace(beside, live)

    def _close_attempt(self, outcome: Outcome) -> None:
        """Note the attempt's end, unless that of the last one is noted already."""
        if not self._record.attempts or self._record.attempts[-1].ended_utc is not None:
            return
        *earlier, last = self._record.attempts
        cause = outcome.failure.cause if outcome.failure else outcome.stopped
        last = dataclasses.replace(last, ended_utc=utc_now(), exit_codes=outcome.exit_codes, cause=cause)
        self._record = dataclasses.replace(self._record, attempts=(*earlier, last))

    def _on_running(self) -> None:
        self._to(states.RUNNING)

    def _shell(self, nodes: Mapping[str, str] | None) -> dict[str, str]:
        """The environment that a node's workers' own is laid over: the node's, or the submitting shell's."""
        if nodes is not None:
            return environment.inherited(nodes)
        shell = environment.inherited(os.environ)
        del shell["PYTHONPATH"]  # the supervisor's
        if theirs := os.environ.get("PACELINE_SHELL_PYTHONPATH"):
            shell["PYTHONPATH"] = theirs
        return shell

    def _owner(self) -> dict[str, Any]:
        """Who looks after the run: this process, and the engine's job that it is in, which readers elsewhere ask for."""
        engine = {name: self._record.owner[name] for name in ("engine", "job_id") if name in self._record.owner}
        return store.owner() | engine

    # --- reasons to stop

    def _waiting(self, text: str) -> bool:
        if text != self._record.waiting_for:
            self._record = dataclasses.replace(self._record, waiting_for=text)
            store.write(self._folder, self._record)
        return self._stop_reason() is not None

    def _cancel_reason(self) -> str | None:
        if self._folder.cancel_request.exists():
            return "cancel"
        number = self._wake.stopped_by
        if number is None:
            return None
        if number == signal.SIGUSR2:
            return "time_limit"
        return "interrupted" if self._folder.engine.exists() else "cancel"

    def _stop_reason(self) -> str | None:
        if (reason := self._cancel_reason()) is not None:
            return reason
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "time_limit"
        return None

    # --- the end

    def _finish(self, outcome: Outcome) -> None:
        """Leave nothing behind, then write the end."""
        self._to(states.FINALIZING, waiting_for=None)
        if not self._record.attempts:
            remove_containers(self._job, self._record.run_id)  # of an image that was being looked at
        self._clean_nodes()
        self._give_nodes_back()
        processes.kill_descendants(os.getpid())
        self._held.close()
        unlink_inputs(self._job, self._folder)
        work_dir.clean(self._folder)
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        self._target.release(self._folder.path)
        changes: dict[str, Any] = {"ended_utc": utc_now(), "scratch_dir": None}
        if outcome.stopped == "interrupted":
            # A preemption, or somebody's cancel: the engine knows, and readers ask it. It may start the job again.
            say("the engine has asked for the end of its job; the workers were ended")
            self._to(states.QUEUED, waiting_for="interrupted by the engine", scratch_dir=None)
        elif outcome.stopped == "cancel":
            say(f"canceled. {outcome.stalled}" if outcome.stalled else "canceled")
            self._to(states.CANCELED, exit_code=EXIT_CANCELED, canceled_by=self._canceled_by(), **changes)
        elif outcome.stopped == "time_limit":
            by_engine = self._wake.stopped_by == signal.SIGUSR2
            report = _time_limit_report(self._record, outcome.stalled, by_engine=by_engine)
            self._to(states.FAILED, failure=report, exit_code=EXIT_TIME_LIMIT, **changes)
        elif outcome.failure is not None:
            say(outcome.failure.message)
            self._to(states.FAILED, failure=outcome.failure, exit_code=outcome.failure.exit_code, **changes)
        else:
            self._to(states.COMPLETED, exit_code=0, **changes)

    def _canceled_by(self) -> str:
        if self._folder.cancel_request.exists():
            return str((read_json(self._folder.cancel_request) or {}).get("by", "unknown"))
        return signal_name(self._wake.stopped_by or 0)

    def fail_internally(self, error: BaseException) -> None:
        """An error of ours, or of the disk's: end everything, say so in the record, the traceback in the driver's log."""
        processes.kill_descendants(os.getpid())
        remove_containers(self._job, self._record.run_id)
        with contextlib.suppress(OSError):  # a full disk
            traceback.print_exc()
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        self._target.release(self._folder.path)
        if self._record.is_terminal:
            return
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        report = FailureReport(
            cause="disk" if full else "internal",
            message=(
                f"The disk of {str(self._folder.path)!r} is full. Free some space and submit again."
                if full
                else f"An error of Paceline's own: {type(error).__name__}: {error}. Please report it with the driver's log."
            ),
            see=f"cat {self._folder.driver_log}",
        )
        self._to(states.FAILED, failure=report, exit_code=1, ended_utc=utc_now(), scratch_dir=None)

    def _to(self, status: str, **changes: Any) -> None:
        self._record = store.change(self._folder, self._record, status, **changes)


def _interrupted_report(record: RunRecord) -> FailureReport:
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


def _prepare_report(record: RunRecord, error: OSError) -> FailureReport:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return FailureReport(
        cause="disk" if full else "prepare",
        message=f"The working directory could not be prepared: {error.strerror}: {error.filename!r}.",
        see=logs_command(record.run_id),
    )


def _time_limit_report(record: RunRecord, stalled: str | None, *, by_engine: bool) -> FailureReport:
    limit = record.job.max_run_duration_seconds if record.job else None
    message = (
        f"The time that {record.target!r} gives the job was nearly up, and the workers were ended. Ask for more time."
        if by_engine
        else f"The run took longer than max_run_duration_seconds={limit:g} and was ended."
    )
    return FailureReport(
        cause="time_limit",
        message=f"{message} {stalled}" if stalled else message,
        exit_code=EXIT_TIME_LIMIT,
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )
