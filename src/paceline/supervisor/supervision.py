"""What a supervisor knows of its run, and the run's record, which it alone writes."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Mapping
from typing import Any

from paceline.job.job import Job
from paceline.job.plan import Launch, NodeSetup, RemotePaths
from paceline.runs import remote_status, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, RunRecord, parse_utc, utc_now
from paceline.supervisor.attempt import Outcome
from paceline.supervisor.driver_log import say
from paceline.supervisor.signals import Wake
from paceline.system.files import read_json
from paceline.targets import Nodes, Target


class Supervision:
    """One run, from its queue to its end.

    target: None until it has been found. nodes, seen, prepared: what the run holds at the moment.
    held: what is kept for it until it ends: an environment, the views of its data.
    left_out: {"name": ..., "why": ...} of what is no file of the run's, once its workers have ended.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.wake = Wake()
        self.record: RunRecord = store.stored(folder)
        assert self.record.job is not None, "only submitted runs have a supervisor"
        self.job: Job = self.record.job
        #: The values of the job's secrets.
        self.secrets: Mapping[str, str] = read_json(folder.secrets) or {} if self.job.secrets else {}
        self.target: Target | None = None
        self.nodes: Nodes | None = None
        self.seen: RemotePaths | None = None
        self.prepared: tuple[NodeSetup, ...] = ()
        self.held = contextlib.ExitStack()
        self.left_out: list[dict[str, str]] = []
        self._deadline: float | None = None

    # --- the record

    def to(self, status: str, **changes: Any) -> None:
        """Write the run's next state."""
        self.record = store.change(self.folder, self.record, status, **changes)

    def waiting(self, text: str) -> bool:
        """Note what the run waits for; whether to give up waiting."""
        if text != self.record.waiting_for:
            self.record = dataclasses.replace(self.record, waiting_for=text)
            store.write(self.folder, self.record)
        return self.stop_reason() is not None

    def warn(self, text: str) -> None:
        """Note what whoever looks at the run is to know, though it goes on; each sentence once."""
        if text not in self.record.warnings:
            say(f"warning: {text}")
            self.record = dataclasses.replace(self.record, warnings=(*self.record.warnings, text))
            store.write(self.folder, self.record)

    def owner(self) -> dict[str, Any]:
        """Who looks after the run: this process, and the engine's job that it is in, which readers elsewhere ask for."""
        engine = {name: self.record.owner[name] for name in ("engine", "job_id") if name in self.record.owner}
        return store.owner() | engine

    def open_attempt(self, launch: Launch) -> None:
        """Note an attempt's start."""
        now = utc_now()
        attempt = Attempt(number=launch.attempt, started_utc=now, nodes=tuple(node.name for node in launch.nodes))
        self.to(
            states.STARTING,
            attempts=(*self.record.attempts, attempt),
            started_utc=self.record.started_utc or now,
        )

    def close_attempt(self, outcome: Outcome) -> None:
        """Note the attempt's end, unless that of the last one is noted already."""
        if not self.record.attempts or self.record.attempts[-1].ended_utc is not None:
            return
        cause = outcome.failure.cause if outcome.failure else outcome.stopped
        self._change_last_attempt(ended_utc=utc_now(), exit_codes=outcome.exit_codes, cause=cause)

    def note_preemption(self) -> None:
        """The engine has started the run again: what its last attempt was ended or interrupted by was that."""
        self.close_attempt(Outcome(stopped="preempted"))
        if self.record.attempts and self.record.attempts[-1].cause == "interrupted":
            self._change_last_attempt(cause="preempted")

    def _change_last_attempt(self, **changes: Any) -> None:
        *earlier, last = self.record.attempts
        last = dataclasses.replace(last, **changes)
        self.record = dataclasses.replace(self.record, attempts=(*earlier, last))

    # --- reasons to stop

    def start_clock(self) -> None:
        """From here on the workers may run: the rest of max_run_duration_seconds counts, less what earlier attempts took."""
        limit = self.job.max_run_duration_seconds
        if limit is not None:
            self._deadline = time.monotonic() + limit - sum(map(_duration_s, self.record.attempts))

    def stop_clock(self) -> None:
        """The run waits in the queue, which does not count."""
        self._deadline = None

    def cancel_reason(self) -> str | None:
        """Why the run is to end, but for its own limit of time: "cancel", "time_limit" (the engine's) or "interrupted"."""
        if self.folder.cancel_request.exists():
            return "cancel"
        number = self.wake.stopped_by
        if number is None:
            return None
        if number == signal.SIGUSR2:
            return "time_limit"
        # An engine may start the job again, unless it has said that it never does.
        may_return = self.folder.engine.exists() and remote_status.engine(self.folder).get("sigterm") != "cancel"
        return "interrupted" if may_return else "cancel"

    def stop_reason(self) -> str | None:
        """Why the run is to end: "cancel", "time_limit" or "interrupted"; None where it is to go on."""
        if (reason := self.cancel_reason()) is not None:
            return reason
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "time_limit"
        return None


def _duration_s(attempt: Attempt) -> float:
    if attempt.ended_utc is None:
        return 0.0
    return max(0.0, (parse_utc(attempt.ended_utc) - parse_utc(attempt.started_utc)).total_seconds())
