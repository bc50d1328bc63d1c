"""`python -m paceline.supervisor RUN_DIR [FD [MODULE ...]]`: supervise one run.

The program consists of two processes: the guardian, which only waits, and its child, the supervisor. Both hold the
run's lock. If something kills the supervisor, the guardian ends the run's processes and records the failure.

    submitting program ── guardian ── supervisor ── workers, or mpirun ── workers
                          subreaper   subreaper

FD is the file descriptor of the run's lock, or of a socket that will deliver the lock
(`paceline.targets.supervisors.Early`). While the process waits for the lock, it imports the MODULEs. Without FD, a
job of Slurm or another engine has started this process, and the process takes the lock itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.system import lazy_import

if __name__ == "__main__":
    # Disable garbage collection until `main`: while modules load, it would scan them repeatedly and free nothing.
    gc.disable()
    # Import inspect only on use: its import takes a tenth of the start's CPU time, and dataclasses rarely uses it.
    lazy_import.later("inspect")

from paceline.runs import store, work_dir
from paceline.runs.claim import Claim
from paceline.runs.driver_log import say
from paceline.runs.failure import signal_name
from paceline.runs.folder import RunFolder
from paceline.runs.store import remove_containers
from paceline.supervisor.supervise import supervise
from paceline.system import processes
from paceline.targets import target_of_run

#: Seconds for which a supervisor that was started in advance waits for a run; and maximum size of a path in bytes (PATH_MAX).
_AHEAD_S, _LONGEST_PATH = 60.0, 4096


def main(argv: list[str]) -> int:
    folder, fd = RunFolder(Path(argv[0])), None
    if len(argv) > 1:
        fd = int(argv[1])
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            found = _wait_to_begin(folder, fd, argv[2:])
            if found is None:
                return 0  # the submitting program has ended without creating a run
            folder, fd = found
    # A lock of flock(2) is held as long as any process has the file open: here this process and its forked child.
    claim = Claim.take(folder.lock, fd)
    if store.has_ended(folder):
        # The engine started this process beside a supervisor that it had lost, and which has ended the run since.
        return 0
    # Become a subreaper before the fork, so that this process adopts every orphan of the supervisor, its child. The child does
    # not inherit this setting: it becomes a subreaper too (below), and adopts the orphans of its workers.
    processes.become_subreaper()
    # Let garbage collections skip the loaded objects: scanning them would copy memory pages that both processes share.
    gc.freeze()
    gc.enable()
    child = os.fork()
    if child:
        processes.leave(_guard(folder, child, claim))
    processes.become_subreaper()
    supervise(folder, claim)
    processes.leave(0)


def _wait_to_begin(folder: RunFolder, fd: int, modules: Sequence[str]) -> tuple[RunFolder, int] | None:
    """Wait for the run. Return its folder and lock, or None if the submission has failed.

    Meanwhile, import `modules`. Then redirect this process's output to the run's file `driver.log`. If the first module is
    "--ahead", `folder` is not used: wait up to a minute for any run of the submitting program.
    """
    is_for_any = modules[:1] == ["--ahead"]
    with socket.socket(fileno=fd) as told:
        for name in modules[is_for_any:]:
            importlib.import_module(name)
        if is_for_any and not select.select([told], [], [], _AHEAD_S)[0]:
            # After this call no run can be sent. But a run may have been sent just before the call, so read the socket below.
            told.shutdown(socket.SHUT_RD)
        # The data is empty if the submitting program has closed the socket (`Early.drop`), or was killed.
        data, fds, _, _ = socket.recv_fds(told, _LONGEST_PATH, 2)
    if not data:
        return None
    if is_for_any:
        folder = RunFolder(Path(os.fsdecode(data)))
        os.environ[processes.SUPERVISOR_VARIABLE] = folder.run_id
    lock_fd, log = fds
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.chdir(folder.path)
    return folder, lock_fd


def _guard(folder: RunFolder, supervisor: int, claim: Claim) -> int:
    def forward(number: int, frame: object) -> None:
        processes.send(supervisor, number if number == signal.SIGUSR2 else signal.SIGTERM)

    # Pass signals on to the supervisor: engines (such as Slurm) and users send them to this process, the supervisor's parent.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, forward)
    # Reap every child: otherwise adopted orphans would stay as zombies.
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    claim.check()
    if status != 0:
        # Mark the run before the kill: this process still holds the lock, so readers would regard the run as alive.
        store.mark_closing(folder)
    # Kill remaining processes even after an orderly end, because a process may have escaped the supervisor.
    processes.kill_descendants(os.getpid())
    if store.has_ended(folder):
        return 0
    record = store.stored(folder)
    if status == 0 and folder.engine.exists():
        return 0  # don't record an end: the engine (such as Slurm) interrupted the run, and may restart it
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    say(f"the supervisor (pid {supervisor}) {how}; its workers were ended")
    remove_containers(record.job, record.run_id)
    claim.check()
    if record.target:
        target_of_run(folder.path).release(folder.path)
    work_dir.clean(folder)
    store.close_deserted(folder, record, store.deserted_report(record))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
