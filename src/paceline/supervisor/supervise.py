"""See one run through: queue, prepare, attempt after attempt, finalize."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from paceline import processes
from paceline.errors import EnvironmentBuildError, UserError
from paceline.job import Job
from paceline.launchers import environment, get_launcher
from paceline.library import library_dir
from paceline.plan import Launch, Prepared
from paceline.runs import states, store
from paceline.runs.failure import EXIT_CANCELED, EXIT_TIME_LIMIT, FailureReport, logs_command, signal_name
from paceline.runs.files import read_json, write_json
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, RunRecord, utc_now
from paceline.supervisor import work_dir
from paceline.supervisor.attempt import AttemptWatch, Outcome
from paceline.supervisor.driver_log import say
from paceline.supervisor.in_containers import remove_containers, wrapped
from paceline.supervisor.inputs import hold_environment, link_inputs, unlink_inputs, views
from paceline.supervisor.nodes import Done, on_nodes
from paceline.supervisor.wake import Wake
from paceline.targets import Granted, Target, get_target

#: Causes after which another attempt may do better. A script's own exception is not one: it would come again.
RETRIED = frozenset({"killed", "launcher"})


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
        self._target: Target = get_target(self._record.target or "local")
        self._deadline: float | None = None
        self._held = contextlib.ExitStack()

    def run(self) -> None:
        self._to(states.QUEUED, owner=store.owner())
        granted = self._target.wait_for_nodes(self._job, self._folder.path, self._waiting)
        if granted is None:
            self._finish(Outcome(stopped="cancel"))
            return
        self._to(states.PREPARING, waiting_for=None)
        try:
            directory = work_dir.make(self._folder)
            scratch = self._make_scratch()
        except OSError as error:
            self._finish(Outcome(failure=_prepare_report(self._record, error)))
            return
        done, prepared = self._prepare()
        if done.failure is not None or done.stopped is not None:
            self._finish(Outcome(failure=done.failure, stopped=done.stopped))
            return
        if self._job.max_run_duration_seconds is not None:
            self._deadline = time.monotonic() + self._job.max_run_duration_seconds
        try:
            link_inputs(self._job, prepared[0], directory)
            outcome = self._attempts(granted, prepared, directory, scratch)
        except UserError as error:
            # What only the environment that was just made could show: it has no mpirun, say.
            outcome = Outcome(failure=FailureReport(cause="launcher", message=str(error)))
        self._finish(self._with_outputs_stored(outcome))

    # --- what runs once on each node

    def _prepare(self) -> tuple[Done, tuple[Prepared, ...]]:
        """Environment and data, on each node; nothing is started where the job needs neither."""
        job = self._job
        if not (job.environment.needs_build or job.environment.docker_image or job.inputs):
            return Done(), (Prepared(python=job.environment.python or sys.executable),) * job.node_count
        try:
            # From here on the views of the run's data are somebody's.
            self._held.enter_context(views(job, self._folder.run_id))
        except UserError as error:
            return Done(failure=FailureReport(cause="data", message=str(error))), ()
        while True:
            done = self._on_all_nodes("prepare")
            if not done.results or not job.environment.needs_build:
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

    def _on_all_nodes(self, verb: str) -> Done:
        return on_nodes(
            verb,
            range(self._job.node_count),
            folder=self._folder,
            target=self._target,
            wake=self._wake,
            stop=self._stop_reason,
        )

    def _with_outputs_stored(self, outcome: Outcome) -> Outcome:
        """The outcome once output folders are stored, which is part of it. A canceled run stores nothing."""
        if not any(reference.is_output for reference in self._job.inputs) or not self._record.attempts:
            return outcome
        if outcome.stopped == "cancel":
            say(f"canceled: outputs are not stored; they are in {self._folder.uploads}")
            return outcome
        self._to(states.FINALIZING)
        done = on_nodes(
            "store", [0], folder=self._folder, target=self._target, wake=self._wake, stop=self._cancel_reason
        )
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

    # --- the attempts

    def _attempts(self, granted: Granted, prepared: tuple[Prepared, ...], directory: Path, scratch: Path) -> Outcome:
        number = 0
        while True:
            number += 1
            outcome = self._attempt(self._launch(number, granted, prepared, directory, scratch))
            again = (
                outcome.failure is not None and outcome.failure.cause in RETRIED and number <= self._job.max_restarts
            )
            self._close_attempt(outcome)
            if not again:
                return outcome
            assert outcome.failure is not None
            say(f"attempt {number} failed ({outcome.failure.cause}): {outcome.failure.message} Starting the next.")

    def _attempt(self, launch: Launch) -> Outcome:
        if (reason := self._stop_reason()) is not None:
            return Outcome(stopped=reason)
        shell = self._shell()
        commands = [
            environment.with_paths(command, launch, shell)
            for command in get_launcher(self._job.launcher).commands(launch)
        ]
        self._make_logs(launch)
        now = utc_now()
        attempt = Attempt(number=launch.attempt, started_utc=now, nodes=tuple(node.name for node in launch.nodes))
        self._to(
            states.STARTING,
            attempts=(*self._record.attempts, attempt),
            started_utc=self._record.started_utc or now,
        )
        watch = AttemptWatch(
            launch, self._target, self._wake, shell=shell, stop=self._stop_reason, on_running=self._on_running
        )
        try:
            return watch.run(wrapped(commands, launch, shell))
        finally:
            remove_containers(self._job, self._record.run_id)

    def _launch(
        self, number: int, granted: Granted, prepared: tuple[Prepared, ...], directory: Path, scratch: Path
    ) -> Launch:
        workspace = self._folder.path.parent.parent
        return Launch(
            job=self._job,
            run_id=self._record.run_id,
            experiment=self._record.experiment,
            workspace_name=workspace.parent.name if workspace.name == ".paceline" else workspace.name,
            run_dir=self._folder.path,
            work_dir=directory,
            scratch_dir=scratch,
            library_dir=library_dir(workspace),
            nodes=granted.nodes,
            prepared=prepared,
            ports=granted.ports,
            attempt=number,
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
        if not self._record.attempts:
            return
        *earlier, last = self._record.attempts
        cause = outcome.failure.cause if outcome.failure else outcome.stopped
        last = dataclasses.replace(last, ended_utc=utc_now(), exit_codes=outcome.exit_codes, cause=cause)
        self._record = dataclasses.replace(self._record, attempts=(*earlier, last))

    def _on_running(self) -> None:
        self._to(states.RUNNING)

    def _shell(self) -> dict[str, str]:
        """The environment that the workers' own is laid over: the submitting shell's."""
        shell = environment.inherited(os.environ)
        del shell["PYTHONPATH"]  # the supervisor's
        if theirs := os.environ.get("PACELINE_SHELL_PYTHONPATH"):
            shell["PYTHONPATH"] = theirs
        return shell

    def _make_scratch(self) -> Path:
        """A folder with a short path, for sockets and shared memory; in memory where there is such a file system."""
        top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        scratch = Path(top) / f"paceline-{secrets.token_hex(4)}"
        self._record = dataclasses.replace(self._record, scratch_dir=str(scratch))
        store.write(self._folder, self._record)  # first the note, then the folder: whoever cleans up must know of it
        scratch.mkdir(mode=0o700)
        return scratch

    # --- reasons to stop

    def _waiting(self, text: str) -> bool:
        if text != self._record.waiting_for:
            self._record = dataclasses.replace(self._record, waiting_for=text)
            store.write(self._folder, self._record)
        return self._stop_reason() is not None

    def _cancel_reason(self) -> str | None:
        return "cancel" if self._wake.stopped_by is not None or self._folder.cancel_request.exists() else None

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
        processes.kill_descendants(os.getpid())
        if not self._record.attempts:
            remove_containers(self._job, self._record.run_id)  # of an image that was being looked at
        self._held.close()
        unlink_inputs(self._job, self._folder)
        work_dir.clean(self._folder)
        if self._record.scratch_dir:
            shutil.rmtree(self._record.scratch_dir, ignore_errors=True)
        self._target.release(self._folder.path)
        changes: dict[str, Any] = {"ended_utc": utc_now(), "scratch_dir": None}
        if outcome.stopped == "cancel":
            say(f"canceled. {outcome.stalled}" if outcome.stalled else "canceled")
            self._to(states.CANCELED, exit_code=EXIT_CANCELED, canceled_by=self._canceled_by(), **changes)
        elif outcome.stopped == "time_limit":
            report = _time_limit_report(self._record, outcome.stalled)
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
        if self._record.scratch_dir:
            shutil.rmtree(self._record.scratch_dir, ignore_errors=True)
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


def _prepare_report(record: RunRecord, error: OSError) -> FailureReport:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return FailureReport(
        cause="disk" if full else "prepare",
        message=f"The working directory could not be prepared: {error.strerror}: {error.filename!r}.",
        see=logs_command(record.run_id),
    )


def _time_limit_report(record: RunRecord, stalled: str | None) -> FailureReport:
    limit = record.job.max_run_duration_seconds if record.job else None
    message = f"The run took longer than max_run_duration_seconds={limit:g} and was ended."
    return FailureReport(
        cause="time_limit",
        message=f"{message} {stalled}" if stalled else message,
        exit_code=EXIT_TIME_LIMIT,
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )
