"""The process of a controller: `python -m MODULE RUN_DIR [FD]` sees one run with children through.

FD: its open lock. Without it an engine has started this, in a job of its own: it takes the lock itself, and a signal is the
engine's, which starts it again or says how it ended. It just ends then, and its children run on.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.runs import controllers, read, states, store
from paceline.runs.driver_log import say
from paceline.runs.failure import EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks
from paceline.system.files import read_json

#: For the submitting program, or this job's life before it was put back into the queue, to let go of the lock. On a file system
#: without locks, and after this time, the engine alone sees to it that there is one controller.
_LOCK_S = 20.0


class SeesThrough(Protocol):
    """What sees a run through once it is built."""

    def run(self, record: RunRecord) -> None:
        """To the run's end, which is written down; or until its folder is gone. record: as it is now, with this process as its
        owner.
        """


def see_through(
    argv: list[str],
    make: Callable[[RunFolder], SeesThrough],
    give_up: Callable[[RunFolder, Exception], None],
    goes_on: Callable[[RunFolder], bool] = lambda folder: False,
) -> int:
    """See the run of this command line through; the exit code.

    give_up: ends the run as Failed. goes_on: whether a run that has just ended is to go on, for more was asked of it.
    """
    folder = RunFolder(Path(argv[0]))
    # This process's own PYTHONPATH is Paceline's library alone. The children get the one of the shell that submitted the run.
    os.environ["PYTHONPATH"] = os.environ.pop("PACELINE_SHELL_PYTHONPATH", "")
    if len(argv) > 1:
        # No program that is started from here may inherit the lock: it would seem held after this controller has died, and then
        # nobody could take the run over.
        os.set_inheritable(int(argv[1]), False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The loop sees the request at its next look and ends the children in order; an exception raised here would cut off
            # whatever runs.
            signal.signal(number, lambda *_: read.request_cancel(folder, by="a signal"))
    else:
        locks.take_within(folder.lock, _LOCK_S)
    try:
        while True:
            controller = make(folder)
            # Noted as the owner only once it is built: this takes back the count of starts that came to nothing.
            controller.run(controllers.own(folder))
            if not goes_on(folder):
                break
            # Asked for in the moment in which the end was written.
            folder.cancel_request.unlink(missing_ok=True)
            controllers.reopen(folder, store.stored(folder))
    except Exception as error:
        # The error came after the end was written: the end that readers have seen stands.
        if store.stored(folder).is_terminal:
            return 0
        if not isinstance(error, PacelineError):
            say(traceback.format_exc())
        give_up(folder, error)
        return 1
    return 0


def close(folder: RunFolder, record: RunRecord, failure: FailureReport | None) -> RunRecord:
    """Write down the end of a run none of whose children runs any more; its record then. failure: None where it is Completed."""
    told: dict[str, Any]
    # A cancel goes before a failure: it is why the run ended, however its children did.
    if folder.cancel_request.exists():
        by = (read_json(folder.cancel_request) or {}).get("by", "unknown")
        status, told = states.CANCELED, {"exit_code": EXIT_CANCELED, "canceled_by": str(by)}
    elif failure is not None:
        status, told = states.FAILED, {"exit_code": failure.exit_code, "failure": failure}
    else:
        status, told = states.COMPLETED, {"exit_code": 0}
    record = store.change(folder, record, status, ended_utc=utc_now(), waiting_for=None, **told)
    # Not always what was asked for: a cancel may have been `Run.fail`.
    say(f"the {record.kind} is {record.status}")
    return record
