"""Programs that a lab keeps running. They die with the process that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.system import processes


class Daemons:
    """Named programs, each with its output in `log/<name>.out`."""

    def __init__(
        self, log: Path, *, limit_s: float, cwd: str | Path = "/", environment: Mapping[str, str] | None = None
    ) -> None:
        self._log, self._limit_s, self._cwd = log, limit_s, cwd
        self._environment = {**os.environ, **(environment or {})}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a program."""
        assert name not in self._running, f"{name} is running"
        with (self._log / f"{name}.out").open("ab") as file:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self._cwd,
            )

    def stop(self, name: str, *, number: int = signal.SIGTERM, child_too: bool = False) -> None:
        """End a program, if it runs, by a signal and after 10 s by SIGKILL.

        child_too: Whether its first child gets the signal too, as on a host, where the program is the child of nsenter.
        """
        process = self._running.pop(name, None)
        if process is None:
            return
        child = 0
        if child_too:
            with contextlib.suppress(OSError, IndexError):
                child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
                os.kill(child, number)
        process.send_signal(number)
        deadline = time.monotonic() + 10
        while process.poll() is None or (child and processes.is_alive(child)):
            if time.monotonic() > deadline:
                process.kill()
                with contextlib.suppress(OSError):
                    os.kill(child or process.pid, signal.SIGKILL)
            time.sleep(0.01)

    def stop_all(self, *, number: int = signal.SIGTERM) -> None:
        """End all programs by a signal, the last one first."""
        for name in reversed(list(self._running)):
            self.stop(name, number=number)

    def until(self, condition: Callable[[], object], what: str, about: Callable[[], str] = lambda: "") -> None:
        """Wait until a condition holds. Fail at once if a program has ended, and after the limit with the text of `about`."""
        deadline = time.monotonic() + self._limit_s
        while not condition():
            dead = [name for name, process in self._running.items() if process.poll() is not None]
            assert not dead, f"{dead} ended; see {self.tail(dead[0])}"
            assert time.monotonic() < deadline, f"{what}: not within {self._limit_s} s; {about()}"
            time.sleep(0.05)

    def tail(self, name: str, length: int = 1500) -> str:
        """Return the ends of the logs whose file names begin with `name`, which may be a pattern."""
        paths = sorted(self._log.glob(f"{name}*"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-length:]}" for path in paths)
