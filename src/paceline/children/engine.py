"""Control a run with children: its state, its loop, its end, and its process.

A run with children is a sweep with its trials, or a pipeline with its steps. Its controller reads everything from the
records of the run and its children. So a new controller can replace a crashed controller at any time.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import signal
import time
import traceback
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from paceline.children.retries import Canceling, Refusals
from paceline.errors import EngineError, PacelineError
from paceline.runs import controllers, read, removal, states, store
from paceline.runs.claim import Claim
from paceline.runs.driver_log import say
from paceline.runs.failure import EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.messenger import Messenger
from paceline.runs.record import RunRecord, utc_now
from paceline.system.files import read_json
from paceline.system.names import counted

#: Seconds between two ticks of a sweep's or pipeline's controller. An ended trial's core is idle for half of this time.
_TICK_S = 0.05
#: Seconds between two checks of an idle controller whether another one has taken over the run.
_CHECK_S = 1.0
#: Pause in seconds between two checks of which child runs are still live, after a failed controller has canceled them.
_GIVE_UP_S = 0.5


class ParentState(abc.ABC):
    """The locked record of a sweep or pipeline, with its child runs."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = store.stored(folder)
        #: The claim of this process, which `main` sets. A process without a claim respects each claim in the file.
        self.claim = Claim(folder.lock, b"")

    @property
    @abc.abstractmethod
    def live(self) -> Sized:
        """The child runs that have begun and not ended."""

    @property
    def runs_dir(self) -> Path:
        return self.folder.path.parent

    def check(self) -> None:
        """End this process if another one controls the run."""
        self.claim.check()

    def note(self, **changes: Any) -> None:
        """Write changed fields into the record of the sweep or pipeline."""
        self.check()
        self.record = dataclasses.replace(self.record, **changes)
        store.write(self.folder, self.record)

    def to(self, status: str, **changes: Any) -> None:
        """Write `status` as the run's state, with further `changes` to its record."""
        self.check()
        self.record = store.change(self.folder, self.record, status, **changes)

    def close(self, failure: FailureReport | None, digest: str = "") -> None:
        """Record the end of the run, whose children have ended.

        The run becomes Canceled if there is a cancel request, otherwise Failed with `failure`, or Completed if `failure`
        is None. `digest` is a text for notifications, such as the results of a sweep.
        """
        fields: dict[str, object]
        if self.folder.cancel_request.exists():
            by = (read_json(self.folder.cancel_request) or {}).get("by", "unknown")
            status, fields = states.CANCELED, {"exit_code": EXIT_CANCELED, "canceled_by": str(by)}
        elif failure is not None:
            status, fields = states.FAILED, {"exit_code": failure.exit_code, "failure": failure}
        else:
            status, fields = states.COMPLETED, {"exit_code": 0}
        self.to(status, digest=digest, ended_utc=utc_now(), waiting_for=None, **fields)
        # Log the status in the record: if a user has called `Run.fail`, `store.change` records Failed instead of Canceled.
        say(f"the {self.record.kind} is {self.record.status}")

    def wait_for(self, text: str | None) -> None:
        """Record what the sweep or pipeline waits for. None: it does not wait."""
        if text != self.record.waiting_for:
            self.note(waiting_for=text)

    def refused(
        self, child: str, begun: Iterable[RunFolder], refusals: Refusals, error: EngineError, advice: str = ""
    ) -> None:
        """Remove children that the engine (such as Slurm) refused, to retry later.

        Args:
            child: Name of the child in messages, such as "trial 3".
            begun: Run folders of the refused children. No process of these runs has started.
            refusals: The backoff of the compute target, which this call extends.
            error: Error of the engine.
            advice: Last sentence of the message of the raised error.

        Raises:
            EngineError: The engine has accepted nothing for an hour.
        """
        self.check()
        for folder in begun:
            if folder.state.exists():
                removal.remove(folder)
        pause = refusals.refused(child.partition(" ")[0], error, others_run=bool(len(self.live)), advice=advice)
        say(f"{child} could not be handed over, and will be tried again in {pause:g} s: {error}")
        self.wait_for(f"compute target {refusals.target!r}, which does not take {child}: {error}")


State = TypeVar("State", bound=ParentState)


class ParentController(abc.ABC, Generic[State]):
    """The control loop of a run with children.

    Each pass of the loop (tick) reads the children's records and repeats failed cancel requests. If the run must end,
    the controller then cancels all children. Otherwise the controller starts the children that may begin.
    """

    #: Cause in the failure report if a mistake in the user's input has ended the run.
    CAUSE: ClassVar[str]

    def __init__(self, folder: RunFolder) -> None:
        self.state: State = self.read_state(folder)
        self.canceling = Canceling(f"{self.state.record.kind} {folder.run_id}", self.state.check)
        self.messenger = Messenger(folder)

    def run(self, record: RunRecord) -> None:
        """Control the run until it has ended or its folder is removed.

        `record` is the run's current record, in which this process is the owner of the run.
        """
        state = self.state
        state.record = record
        self.take_up()
        if state.record.status != states.RUNNING:
            state.to(states.RUNNING, started_utc=state.record.started_utc or utc_now())
            self.messenger.tell(state.record, "start")
        check_at = 0.0
        while state.folder.state.exists():
            # Don't check in each tick, because a check asks the server of NFS. All actions check again.
            if time.monotonic() >= check_at:
                state.check()
                check_at = time.monotonic() + _CHECK_S
            self.look()
            self.canceling.again()
            if reason := self.end_reason():
                self.stop_all(reason)
                is_over = not len(state.live)
            else:
                self.advance()
                is_over = not len(state.live) and self.is_done()
            if is_over:
                if wrong := self.messenger.wrong():
                    state.note(warnings=(*state.record.warnings, *wrong))
                self.write_end()
                return
            time.sleep(_TICK_S)
        # The run's folder is gone, so this process can neither receive cancel requests nor record the end. Cancel all children.
        self.stop_all(f"the {state.record.kind}'s folder is gone")

    @staticmethod
    @abc.abstractmethod
    def read_state(folder: RunFolder) -> State:
        """Return the record and child runs of the sweep or pipeline in this folder."""

    @abc.abstractmethod
    def take_up(self) -> None:
        """Take over the child runs that an earlier controller has started."""

    @abc.abstractmethod
    def look(self) -> None:
        """Read the child runs' records, and log changed states."""

    @abc.abstractmethod
    def end_reason(self) -> str | None:
        """Return why the sweep or pipeline must end now; None to continue."""

    @abc.abstractmethod
    def stop_all(self, reason: str) -> None:
        """Cancel all child runs (trials or steps) that have not ended."""

    @abc.abstractmethod
    def advance(self) -> None:
        """Start the child runs (trials or steps) that may begin."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Return whether no more child runs (trials or steps) will begin."""

    @abc.abstractmethod
    def write_end(self) -> None:
        """Record the end of the sweep or pipeline, whose child runs have ended."""

    @staticmethod
    @abc.abstractmethod
    def living(folder: RunFolder) -> Iterable[RunFolder]:
        """Return the folders of child runs that have not ended."""

    @staticmethod
    def reopens(folder: RunFolder) -> bool:
        """Return whether an ended run must continue, for example because trials were added."""
        return False


def counts_text(noun: str, statuses: Iterable[str]) -> str:
    """Return how many child runs have each status: "3 trials: 2 Completed, 1 Failed"."""
    from collections import Counter

    counts = Counter(statuses)
    return f"{counted(counts.total(), noun)}: {', '.join(f'{count} {status}' for status, count in counts.items())}"


def give_up(controller: type[ParentController[Any]], folder: RunFolder, error: Exception, claim: Claim) -> None:
    """Cancel the child runs of a failed controller, and mark its run Failed."""
    kind = store.stored(folder).kind
    is_bug = not isinstance(error, PacelineError)
    message = f"{'The controller has failed' if is_bug else f'The {kind} can not go on'}: {error}"
    say(message)
    canceling = Canceling(f"{kind} {folder.run_id}", claim.check)
    # Read the list of children from their records, because the failed controller's own state may be wrong.
    while left := list(controller.living(folder)):
        for child in left:
            canceling.ask(child, message)
        canceling.again()
        time.sleep(_GIVE_UP_S)
    report = FailureReport(cause="internal" if is_bug else controller.CAUSE, message=message)
    claim.check()
    store.change(
        folder, store.stored(folder), states.FAILED, failure=report, exit_code=1, ended_utc=utc_now(), waiting_for=None
    )


def main(argv: list[str], controller: type[ParentController[Any]]) -> int:
    """Control one run as `python -m MODULE RUN_DIR [FD]`.

    FD is the inherited file descriptor of the run's lock. Without FD, a scheduler such as Slurm has started this
    process as a job. In this case the process takes the lock itself. A signal ends the process while its children
    continue; the scheduler then restarts the process or reports its end.
    """
    folder = RunFolder(Path(argv[0]))
    # This process uses a PYTHONPATH with only Paceline's library. Children need the PYTHONPATH of the submitting shell.
    os.environ["PYTHONPATH"] = os.environ.pop("PACELINE_SHELL_PYTHONPATH", "")
    claim = Claim.take(folder.lock, int(argv[1]) if len(argv) > 1 else None)
    if len(argv) > 1:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The handler only writes a cancel request, which the next tick reads. An exception could interrupt any statement.
            signal.signal(number, lambda *_: read.request_cancel(folder, by="a signal"))
    try:
        while True:
            built = controller(folder)
            built.state.claim = claim
            claim.check()
            # Record this process as the controller only after its start: the record resets the count of failed starts.
            built.run(controllers.own(folder))
            claim.check()
            if not controller.reopens(folder):
                return 0
            # A cancel request may have arrived while this process recorded the end. Remove the request.
            folder.cancel_request.unlink(missing_ok=True)
            controllers.reopen(folder, store.stored(folder))
    except Exception as error:
        claim.check()
        # If the end is already recorded, this error does not change it, because readers may have seen the end.
        if store.stored(folder).is_terminal:
            return 0
        if not isinstance(error, PacelineError):
            say(traceback.format_exc())
        give_up(controller, folder, error, claim)
        return 1
