"""`python -m paceline.sweeps RUN_DIR [FD]`: see one sweep through.

FD: its open lock. Without it an engine has started this, in a job of its own: it takes the lock itself, and a signal is the
engine's, which starts it again or says how it ended. It just ends then, and its trials run on.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs import controllers, read, store
from paceline.runs.folder import RunFolder
from paceline.supervisor.logs import say
from paceline.sweeps import ending
from paceline.sweeps.controller import Controller
from paceline.sweeps.results import MORE
from paceline.system import locks

#: For the submitting program, or this job's life before it was put back into the queue, to let go of the lock. On a file system
#: without locks, and after this time, the engine alone sees to it that there is one controller.
_LOCK_S = 20.0


def main(argv: list[str]) -> int:
    folder = RunFolder(Path(argv[0]))
    # This process's own PYTHONPATH is Paceline's library alone. Its trials get the one of the shell that submitted the sweep.
    os.environ["PYTHONPATH"] = os.environ.pop("PACELINE_SHELL_PYTHONPATH", "")
    if len(argv) > 1:
        # No program that is started from here may inherit the lock: it would seem held after this controller has died, and then
        # nobody could take the sweep over.
        os.set_inheritable(int(argv[1]), False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The loop sees the request at its next look and ends the trials in order; an exception raised here would cut off
            # whatever runs.
            signal.signal(number, lambda *_: read.request_cancel(folder, by="a signal"))
    else:
        locks.take_within(folder.lock, _LOCK_S)
    try:
        while True:
            controller = Controller(folder)
            # Noted as the owner only once it is built: this takes back the count of starts that came to nothing.
            controller.sweep.record = controllers.own(folder)
            controller.run()
            if not (folder.path / MORE).exists():
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
        ending.give_up(folder, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
