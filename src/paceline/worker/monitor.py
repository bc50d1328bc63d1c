"""Under mpirun or srun: a worker's own log, and a process that sees the script's end exactly, whatever ends it.

mpirun is the parent of this process and tells nobody the exit codes of its children; so this process stays the
parent of the script, writes down how it ended, and reports success to mpirun, which would otherwise kill the other
workers before they could report.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from paceline.worker import report

#: What a launcher or a scheduler may send: mpirun signals the process that it has started, which is not the script's.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def redirect_output() -> None:
    """Send this process's standard output and error to its rank's log."""
    folder = os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts", os.environ["PACELINE_ATTEMPT"])
    log = os.open(
        os.path.join(folder, f"rank_{os.environ['PACELINE_RANK']}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def wait_for_child(*, under_srun: bool = False) -> None:
    """Fork: the child returns and goes on as the worker; the parent waits for it, reports its end and exits.

    under_srun: the parent holds the worker's connection to PMIx, and passes no signals on: Slurm's reach every process.
    """
    relay = None
    if under_srun:
        from paceline.worker.pmix import PmixRelay

        relay = PmixRelay(os.environ)
    # Taken now, while the disk has room: the end is to be told on a full disk, too.
    report.hold_space(f"end_{os.environ['PACELINE_RANK']}.json")
    # Forked while this process has one thread, and nothing of the script is loaded: a lock that another thread held at that
    # moment would stay held in the child for ever.
    child = os.fork()
    if child == 0:
        if relay is not None:
            relay.leave()
        return

    def forward(number: int, frame: FrameType | None) -> None:
        if relay is not None:
            return
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    # After the fork: the worker keeps the handlers that it was started with.
    for number in _FORWARDED:
        signal.signal(number, forward)
    if relay is not None:
        relay.start(child)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    report.ended(128 - code if code < 0 else code, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    if relay is not None:
        relay.hold(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), int(os.environ["WORLD_SIZE"]))
    # 0 whatever the script's code was: at any other, mpirun would kill all other workers within half a second. And without exit
    # handlers: those that ran until here are the worker's, which has run them.
    os._exit(0)
