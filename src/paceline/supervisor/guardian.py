"""The supervisor's parent: if the supervisor is killed, it ends the workers and closes the record."""

from __future__ import annotations

import os
import signal

from paceline.runs import store, work_dir
from paceline.runs.containers import remove_containers
from paceline.runs.failure import signal_name
from paceline.runs.folder import RunFolder
from paceline.runs.record import utc_now
from paceline.supervisor.driver_log import say
from paceline.system import processes
from paceline.targets import target_of_run


def guard(folder: RunFolder, supervisor: int) -> int:
    """Wait for the supervisor; set right what it could not. The exit code of the process."""

    def forward(number: int, frame: object) -> None:
        processes.send(supervisor, number if number == signal.SIGUSR2 else signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, forward)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    if status != 0:
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
