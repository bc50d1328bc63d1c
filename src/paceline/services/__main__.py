"""`python -m paceline.services SERVICE_DIR [FD]`: supervise one service.

The program consists of two processes. The guardian holds the service's lock and listening socket, and only waits. Its
child, the supervisor, does the work. The guardian restarts a killed supervisor. Until then, clients wait at the socket.

    deploying program, or systemd ── guardian ── supervisor ── server ── model processes
                                     lock, socket

FD is the file descriptor of the service's lock. Without FD, systemd has started this process (`paceline service unit`),
which waits for the lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from paceline.errors import PacelineError, ServiceError, ServiceNotFoundError
from paceline.runs.claim import Claim
from paceline.runs.driver_log import say
from paceline.runs.failure import signal_name
from paceline.services import store
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.listener import open_listener
from paceline.services.record import FAILED, UNHEALTHY, UP
from paceline.services.supervise import run
from paceline.system import locks, processes

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: After so many crashes of the supervisor in a row (kills don't count), a service that was never Healthy becomes Failed.
_MOST_CRASHES = 3
#: Seconds in which the server of a killed supervisor may finish its open requests.
_DRAIN_S = 30.0


class Guardian:
    """The process that restarts the supervisor whenever it crashes or is killed."""

    def __init__(self, folder: ServiceFolder, claim: Claim) -> None:
        self.folder, self.claim = folder, claim
        self.child = 0
        self.is_ended = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)

    def _end(self, number: int, frame: object) -> None:
        self.is_ended = True
        if self.child:
            processes.send(self.child, signal.SIGTERM)

    def run(self) -> int:
        """Restart the supervisor until the service is stopped. Return the exit code."""
        # End server processes of a previous supervisor, which may still hold the port.
        self._clear()
        listener = self._listener()
        if listener is None:
            return 0
        crashes = 0
        with listener:
            while True:
                status = self._supervise(listener)
                self.claim.check()
                if status == 0 or self.is_ended:
                    self._clear()
                    return 0
                code = os.waitstatus_to_exitcode(status)
                how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                say(f"the supervisor {how}; restarting it")
                self._clear()
                # Count crashes but no kills: a supervisor that has crashed may crash again at once.
                crashes = 0 if code < 0 else crashes + 1
                if crashes >= _MOST_CRASHES and self._give_up(how):
                    return 1
                time.sleep(min(crashes**2 * _PAUSE_S, _LONGEST_PAUSE_S))

    def _supervise(self, listener: socket.socket) -> int:
        ends_with_guardian = processes.ends_with_parent(signal.SIGTERM)
        child = os.fork()
        if not child:
            code = 1
            try:
                if ends_with_guardian is not None:
                    ends_with_guardian()
                processes.become_subreaper()  # child processes do not inherit the subreaper setting
                run(self.folder, listener, self.claim)
                code = 0
            except ServiceNotFoundError:
                code = 0  # the service was deleted
            except BaseException:
                with contextlib.suppress(OSError):
                    traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                os._exit(code)
        self.child = child
        if self.is_ended:  # the signal came before self.child was set, so it has not reached the child
            processes.send(child, signal.SIGTERM)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                self.child = 0
                return status

    def _give_up(self, how: str) -> bool:
        record = store.stored(self.folder)
        if record.served:
            return False
        serial = store.desired(self.folder).serial
        store.change(self.folder, record, state=FAILED, settled=serial, failure=f"its supervisor {how}", updating=None)
        return True

    def _listener(self) -> socket.socket | None:
        """Return the service's listening socket; None if the service failed or must stop."""
        is_noted = False
        while True:
            self.claim.check()
            record = store.stored(self.folder)
            target = store.desired(self.folder)
            try:
                return open_listener(record.host, record.port)
            except ServiceError as error:
                if not is_noted:
                    say(str(error))
                    is_noted = True
                changes = {"failure": str(error), "settled": target.serial}
                if not record.served:
                    store.change(self.folder, record, state=FAILED, **changes)
                    return None
                changed = store.change(self.folder, record, state=UNHEALTHY, outage_reported=True, failure=str(error))
                if not record.outage_reported:
                    store.tell_down(self.folder, changed)
            if target.state != UP or self.is_ended:
                # Return no listener, so that this process ends. The next reader of the service's record completes the stop.
                return None
            time.sleep(_PAUSE_S)

    def _clear(self) -> None:
        deadline = time.monotonic() + _DRAIN_S
        is_told = False
        while left := [*processes.descendants(os.getpid()), *processes.with_variable(MARK, str(self.folder.path))]:
            self.claim.check()
            if not is_told or time.monotonic() > deadline:
                for pid in left:
                    processes.send(pid, signal.SIGKILL if is_told else signal.SIGTERM)
                is_told = True
            processes.reap()
            time.sleep(0.02)
        processes.reap()
        self.claim.check()


def main(argv: list[str]) -> int:
    folder = ServiceFolder(Path(argv[0]))
    fd = int(argv[1]) if len(argv) > 1 else None
    while fd is None and (fd := locks.take(folder.lock)) is None:
        time.sleep(_PAUSE_S)
    claim = Claim.take(folder.lock, fd)
    processes.become_subreaper()
    try:
        return Guardian(folder, claim).run()
    except ServiceNotFoundError:
        return 0
    except PacelineError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
