"""`python -m paceline.supervisor RUN_DIR [FD [MODULE ...]]`: see one run through.

Two processes: the guardian, which does nothing but wait, and its child, which does everything. Both hold the run's
lock; if the child is killed, the guardian ends what it has left behind and writes down why the run failed.

    submitting program ── guardian ── supervisor ── workers, or mpirun ── workers
                          subreaper   subreaper

FD: the run's open lock, or a socket by which that will come (`paceline.targets.supervisors.Early`), with modules that
are to be loaded meanwhile. Without it an engine has started this, in a job of its own: it takes the lock itself.
"""

from __future__ import annotations

import importlib
import os
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.runs.folder import RunFolder
from paceline.supervisor.guardian import guard
from paceline.supervisor.supervise import supervise
from paceline.system import locks, processes

_LOCK_S = 20.0


def main(argv: list[str]) -> int:
    folder = RunFolder(Path(argv[0]))
    if len(argv) > 1:
        fd: int | None = int(argv[1])
        if stat.S_ISSOCK(os.fstat(int(argv[1])).st_mode):
            fd = _wait_to_begin(folder, int(argv[1]), argv[2:])
        if fd is None:
            return 0  # it was not to be
        os.set_inheritable(fd, False)
    else:
        _take_lock(folder)
    processes.become_subreaper()
    child = os.fork()
    if child:
        return guard(folder, child)
    processes.become_subreaper()
    supervise(folder)
    return 0


def _wait_to_begin(folder: RunFolder, fd: int, modules: Sequence[str]) -> int | None:
    """The run's lock, once the run is there; None where the submitting program has ended before. Output is the driver's log
    from then on."""
    with socket.socket(fileno=fd) as told:
        for name in modules:
            importlib.import_module(name)
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
    """The submitting program, or this job's life before it was put back into the queue, may hold it for a moment more.

    Not held, it says nothing wrong: of such a run readers ask the engine. It keeps two readers from writing its end.
    """
    deadline = time.monotonic() + _LOCK_S
    while locks.take(folder.lock) is None and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
