"""`python -m paceline.supervisor RUN_DIR [LOCK_FD]`: see one run through.

Two processes: the guardian, which does nothing but wait, and its child, which does everything. Both hold the run's
lock; if the child is killed, the guardian ends what it has left behind and writes down why the run failed.

    submitting program ── guardian ── supervisor ── workers, or mpirun ── workers
                          subreaper   subreaper

Without LOCK_FD an engine has started it, in a job of its own: it takes the lock itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from paceline import processes
from paceline.runs import lock
from paceline.runs.folder import RunFolder
from paceline.supervisor.guardian import guard
from paceline.supervisor.supervise import supervise

_LOCK_S = 20.0


def main(argv: list[str]) -> int:
    folder = RunFolder(Path(argv[0]))
    if len(argv) > 1:
        os.set_inheritable(int(argv[1]), False)
    else:
        _take_lock(folder)
    processes.become_subreaper()
    child = os.fork()
    if child:
        return guard(folder, child)
    processes.become_subreaper()
    supervise(folder)
    return 0


def _take_lock(folder: RunFolder) -> None:
    """The submitting program, or this job's life before it was put back into the queue, may hold it for a moment more.

    Not held, it says nothing wrong: of such a run readers ask the engine. It keeps two readers from writing its end.
    """
    deadline = time.monotonic() + _LOCK_S
    while lock.take(folder.lock) is None and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
