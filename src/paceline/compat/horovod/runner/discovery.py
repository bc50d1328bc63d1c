"""Which hosts an elastic job may have, as a script or a list of them says, and which of them have failed."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner.hosts import Host
from paceline.errors import UserError
from paceline.system.processes import kill_group

#: How often the script is asked.
_LOOK_S = 1.0
#: A script that takes longer is asked again.
_SCRIPT_S = 60.0


def from_script(command: str, slots: int | None) -> Callable[[], list[Host]]:
    """Return a function that runs the command in a shell, as Horovod does: it prints a line `host:slots` or `host` for each host.

    command: or the path of a program or a shell script. slots: of a host without a number, 1.

    Raises (the function):
        UserError: it can't be run, ends with another code than 0, takes too long, or prints what is no host.
    """
    line = shlex.quote(os.path.abspath(command)) if os.path.exists(command) else command

    def ask() -> list[Host]:
        try:
            code, output, errors = _run(line)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--host-discovery-script {command!r} can't be run: {error}. Name a program or a shell command."
            ) from error
        if code:
            said = errors.strip().splitlines()[-1:]
            raise UserError(
                f"--host-discovery-script {command!r} ended with exit code {code}{': ' + said[0] if said else ''}. "
                "It prints a line host:slots for each host, and ends with 0."
            )
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        named = [line if _has_slots(line) else f"{line}:{slots or 1}" for line in lines]
        return host_lists.parse(",".join(named)) if named else []

    return ask


def _run(line: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a shell's line."""
    # A group of its own: of a shell that takes too long its programs have to end too.
    process = subprocess.Popen(
        line,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_SCRIPT_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it took more than {_SCRIPT_S:g} s") from None
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            process.communicate()
    return process.returncode, output, errors


class HostWatch:
    """The hosts that there are now, asked for in a thread, without those that have failed.

    cooldown: seconds (from, to) after which a failed host may come back: the first number after its first failure, then twice as
    long each time, at most the second. None: never.
    """

    def __init__(
        self,
        ask: Callable[[], list[Host]],
        cooldown: Sequence[int] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._cooldown, self._clock = ask, cooldown, clock
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}
        # At once, and in this thread: a script that does not work is told before anything starts.
        self._found: list[Host] = ask()
        self.error: UserError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="horovodrun-hosts", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def usable(self) -> list[Host]:
        """The hosts, in the order in which they are told, without those that have failed."""
        now = self._clock()
        return [host for host in self._found if self._until.get(host.name, 0.0) <= now]

    def failed(self, name: str) -> None:
        """Leave this host out."""
        number = self._failures[name] = self._failures.get(name, 0) + 1
        if self._cooldown is None:
            self._until[name] = float("inf")
            return
        first, most = self._cooldown
        self._until[name] = self._clock() + min(first * 2 ** (number - 1), most)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._found, self.error = self._ask(), None
            except UserError as error:
                # The hosts of before: a script that fails once says nothing of them.
                self.error = error


def _has_slots(line: str) -> bool:
    return line.rpartition(":")[2].isdigit() and not line.endswith("]")
