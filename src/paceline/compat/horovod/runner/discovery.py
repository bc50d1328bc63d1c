"""Which hosts an elastic job may have, as a script or a list of them says, and which of them have failed."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner.hosts import Host
from paceline.errors import UserError

#: How often the script is asked.
_LOOK_S = 1.0
#: A script that takes longer is asked again.
_SCRIPT_S = 60.0


def from_script(path: str, slots: int | None) -> Callable[[], list[Host]]:
    """A function that runs the script: a line `host:slots` or `host` for each host. slots: of a host without a number, 1.

    Raises (the function):
        UserError: it can't be run, ends with another code than 0, or prints what is no host.
    """

    def ask() -> list[Host]:
        try:
            done = subprocess.run(
                [path], capture_output=True, text=True, timeout=_SCRIPT_S, check=True, stdin=subprocess.DEVNULL
            )
        except subprocess.CalledProcessError as error:
            said = (error.stderr or "").strip().splitlines()[-1:]
            raise UserError(
                f"--host-discovery-script {path!r} ended with exit code {error.returncode}{': ' + said[0] if said else ''}. "
                "It prints a line host:slots for each host, and ends with 0."
            ) from error
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
            raise UserError(f"--host-discovery-script {path!r} can't be run: {error}. Name a program.") from error
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        named = [line if _has_slots(line) else f"{line}:{slots or 1}" for line in lines]
        return host_lists.parse(",".join(named)) if named else []

    return ask


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
