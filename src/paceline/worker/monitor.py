"""Under mpirun or srun: give a worker its own log, and report the script's end from a parent process.

mpirun started this process, and does not report its workers' exit codes. So this process forks the worker that runs the
script, and reports the script's end in a file. It exits with 0, because mpirun would otherwise kill the other workers.
"""

from __future__ import annotations

import os
import sys

from paceline.worker import report, spare


def redirect_output() -> None:
    """Redirect this process's standard output and error to its rank's log."""
    folder = os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts", os.environ["PACELINE_ATTEMPT"])
    log = os.open(
        os.path.join(folder, f"rank_{os.environ['PACELINE_RANK']}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def wait_for_child(*, under_srun: bool = False) -> None:
    """Fork the worker. Return only in the worker; the parent reports its end.

    under_srun: Also relay the worker's connection to PMIx. Forward no signals then, because Slurm signals every
    process.
    """
    relay = None
    if under_srun:
        from paceline.worker.pmix import PmixRelay

        relay = PmixRelay(os.environ)
    # Reserve disk space now, so that this process can report the worker's end even if the disk is full by then.
    report.hold_space(f"end_{os.environ['PACELINE_RANK']}.json")
    # Fork while this process has one thread: in the child, a lock that another thread holds would stay locked forever.
    child = os.fork()
    if child == 0:
        if relay is not None:
            relay.leave()
        spare.let_go()
        return
    # Set the signal handlers after the fork, so that they are set only in this process and not in the worker.
    spare.forward_signals(None if relay is not None else child)
    if relay is not None:
        relay.start(child)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    report.ended(128 - code if code < 0 else code, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    if relay is not None:
        relay.hold(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), int(os.environ["WORLD_SIZE"]))
    # Exit with 0 even if the worker has failed: otherwise mpirun would soon kill all workers. Skip exit handlers.
    os._exit(0)
