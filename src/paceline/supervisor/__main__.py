"""`python -m paceline.supervisor RUN_DIR LOCK_FD`: see one run through.

Two processes: the guardian, which does nothing but wait, and its child, which does everything. Both hold the run's
lock; if the child is killed, the guardian ends what it has left behind and writes down why the run failed.

    submitting program ── guardian ── supervisor ── workers, or mpirun ── workers
                          subreaper   subreaper
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline import processes
from paceline.runs.folder import RunFolder
from paceline.supervisor.guardian import guard
from paceline.supervisor.supervise import supervise


def main(argv: list[str]) -> int:
    folder = RunFolder(Path(argv[0]))
    os.set_inheritable(int(argv[1]), False)
    processes.become_subreaper()
    child = os.fork()
    if child:
        return guard(folder, child)
    processes.become_subreaper()
    supervise(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
