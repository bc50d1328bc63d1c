"""`python -m paceline.supervisor RUN_DIR [FD [MODULE ...]]`: see one run through.

Two processes: the guardian, which does nothing but wait, and its child, which does everything. Both hold the run's
lock; if the child is killed, the guardian ends what it has left behind and writes down why the run failed.

    submitting program ── guardian ── supervisor ── workers, or mpirun ── workers
                          subreaper   subreaper

FD: the run's open lock, or a socket by which that will come (`paceline.targets.supervisors.Early`), with modules that
are to be loaded meanwhile. Without it an engine has started this, in a job of its own: it takes the lock itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.system import lazy_import

if __name__ == "__main__":
    # What is loaded stays until the end: the collector would look at all of it again and again (`main` starts it).
    gc.disable()
    # A tenth of what a start computes: dataclasses import it, and ask it only about a class that has no docstring.
    lazy_import.later("inspect")

from paceline.runs import store, work_dir
from paceline.runs.driver_log import say
from paceline.runs.failure import signal_name
from paceline.runs.folder import RunFolder
from paceline.runs.record import utc_now
from paceline.runs.store import remove_containers
from paceline.supervisor.supervise import supervise
from paceline.system import locks, processes
from paceline.targets import target_of_run

_LOCK_S = 20.0


def main(argv: list[str]) -> int:
    folder = RunFolder(Path(argv[0]))
    if len(argv) > 1:
        fd: int | None = int(argv[1])
        if stat.S_ISSOCK(os.fstat(int(argv[1])).st_mode):
            fd = _wait_to_begin(folder, int(argv[1]), argv[2:])
        if fd is None:
            return 0  # the submitting program has ended without a run
        # A lock of flock(2) is held as long as any process has the open file. The two processes here have it by fork;
        # a worker that inherited it as well would keep the run's lock held after both of them were killed.
        os.set_inheritable(fd, False)
    else:
        _take_lock(folder)
    # Before the fork: from its first moment on, what the supervisor leaves as an orphan comes to the guardian. The kernel
    # does not hand this property down, so the supervisor asks for it again, and gets its workers' orphans itself.
    processes.become_subreaper()
    # Collections pass over what is loaded: they would also copy its pages, which both processes share.
    gc.freeze()
    gc.enable()
    child = os.fork()
    if child:
        processes.leave(_guard(folder, child))
    processes.become_subreaper()
    supervise(folder)
    processes.leave(0)


def _wait_to_begin(folder: RunFolder, fd: int, modules: Sequence[str]) -> int | None:
    """The run's lock, once the run is there; None where the submitting program has ended before. Output is the driver's log
    from then on.
    """
    with socket.socket(fileno=fd) as told:
        for name in modules:
            importlib.import_module(name)
        # Nothing comes, and no error, where the other end is closed: by `Early.drop`, or by the kernel when it was killed.
        data, fds, _, _ = socket.recv_fds(told, 16, 2)
    if not data:
        return None
    lock_fd, log = fds
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.chdir(folder.path)
    return lock_fd


def _take_lock(folder: RunFolder) -> None:
    """Wait for the run's lock, which the submitting program, or this job's life before it was put back into the queue, may
    hold for a moment more.

    The run goes on without it: readers ask the engine about such a run. The lock keeps two readers from writing its end.
    """
    locks.take_within(folder.lock, _LOCK_S)


def _guard(folder: RunFolder, supervisor: int) -> int:
    """Wait for the supervisor and set right what it could not; the exit code of the process."""

    def forward(number: int, frame: object) -> None:
        processes.send(supervisor, number if number == signal.SIGUSR2 else signal.SIGTERM)

    # An engine, or `kill`, signals the process that it has started, which is this one.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, forward)
    # Any child, not the supervisor alone: orphans that have come here would stay as zombies.
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    if status != 0:
        # Written before anything is killed: this process still holds the lock, by which readers take the run for alive.
        store.mark_closing(folder)
    # Even after an orderly end: something may have slipped through while the supervisor was ending.
    processes.kill_descendants(os.getpid())
    record = store.stored(folder)
    if record.is_terminal:
        return 0
    if status == 0 and folder.engine.exists():
        return 0  # interrupted by the engine, which starts it again or says how it ended
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    say(f"the supervisor (pid {supervisor}) {how}; its workers were ended")
    remove_containers(record.job, record.run_id)
    ended_utc = utc_now()  # before anybody else can have what the run has held
    if record.target:
        target_of_run(folder.path).release(folder.path)
    work_dir.clean(folder)
    store.close_deserted(folder, record, store.deserted_report(record), ended_utc)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
