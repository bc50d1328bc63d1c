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
from paceline.job import Job
from paceline.launchers import environment, get_launcher
from paceline.library import library_dir
from paceline.plan import Launch
from paceline.runs import states, store
from paceline.runs.failure import EXIT_CANCELED, EXIT_TIME_LIMIT, FailureReport, logs_command, signal_name
from paceline.runs.files import read_json
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, RunRecord, utc_now
from paceline.supervisor import work_dir
from paceline.supervisor.attempt import AttemptWatch, Outcome
from paceline.supervisor.driver_log import say
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
        if self._job.max_run_duration_seconds is not None:
            self._deadline = time.monotonic() + self._job.max_run_duration_seconds
        self._finish(self._attempts(granted, directory, scratch))

    # --- the attempts

    def _attempts(self, granted: Granted, directory: Path, scratch: Path) -> Outcome:
        number = 0
        while True:
            number += 1
            outcome = self._attempt(number, granted, directory, scratch)
            again = (
                outcome.failure is not None and outcome.failure.cause in RETRIED and number <= self._job.max_restarts
            )
            self._close_attempt(outcome)
            if not again:
                return outcome
            assert outcome.failure is not None
            say(f"attempt {number} failed ({outcome.failure.cause}): {outcome.failure.message} Starting the next.")

    def _attempt(self, number: int, granted: Granted, directory: Path, scratch: Path) -> Outcome:
        if (reason := self._stop_reason()) is not None:
            return Outcome(stopped=reason)
        launch = self._launch(number, granted, directory, scratch)
        self._make_logs(launch)
        now = utc_now()
        attempt = Attempt(number=number, started_utc=now, nodes=tuple(node.name for node in granted.nodes))
        self._to(
            states.STARTING,
            attempts=(*self._record.attempts, attempt),
            started_utc=self._record.started_utc or now,
        )
        shell = self._shell()
        commands = [
            environment.with_python_path(command, launch, shell)
            for command in get_launcher(self._job.launcher).commands(launch)
        ]
        watch = AttemptWatch(
            launch, self._target, self._wake, shell=shell, stop=self._stop_reason, on_running=self._on_running
        )
        return watch.run(commands)

    def _launch(self, number: int, granted: Granted, directory: Path, scratch: Path) -> Launch:
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
            python=self._job.python or sys.executable,
            nodes=granted.nodes,
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

    def _stop_reason(self) -> str | None:
        if self._wake.stopped_by is not None or self._folder.cancel_request.exists():
            return "cancel"
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "time_limit"
        return None

    # --- the end

    def _finish(self, outcome: Outcome) -> None:
        """Leave nothing behind, then write the end."""
        self._to(states.FINALIZING, waiting_for=None)
        processes.kill_descendants(os.getpid())
        work_dir.clean(self._folder)
        if self._record.scratch_dir:
            shutil.rmtree(self._record.scratch_dir, ignore_errors=True)
        self._target.release(self._folder.path)
        changes: dict[str, Any] = {"ended_utc": utc_now(), "scratch_dir": None}
        if outcome.stopped == "cancel":
            say("canceled")
            self._to(states.CANCELED, exit_code=EXIT_CANCELED, canceled_by=self._canceled_by(), **changes)
        elif outcome.stopped == "time_limit":
            self._to(states.FAILED, failure=_time_limit_report(self._record), exit_code=EXIT_TIME_LIMIT, **changes)
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


def _time_limit_report(record: RunRecord) -> FailureReport:
    limit = record.job.max_run_duration_seconds if record.job else None
    return FailureReport(
        cause="time_limit",
        message=f"The run took longer than max_run_duration_seconds={limit:g} and was ended.",
        exit_code=EXIT_TIME_LIMIT,
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )
