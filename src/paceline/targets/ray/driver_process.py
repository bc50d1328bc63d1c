"""Start the driver process, or adopt the driver that the job's script has started.

Loading Ray is the slowest step of a run's start, so the job's script starts the first driver in parallel with the
supervisor. The supervisor inherits the driver's pipes as open files:

    3    the driver's input        4    the driver's output
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from paceline.errors import TargetError
from paceline.system import processes

#: The environment variable with the driver's process id. The process that takes over the driver removes the variable.
DRIVER_VARIABLE = "PACELINE_RAY_DRIVER"
READS, SAYS = 3, 4
_END_S = 6.0


class DriverProcess:
    """The process that runs `driver.py`, with pipes to it."""

    def __init__(self, pid: int, reads: BinaryIO, says: BinaryIO, child: subprocess.Popen[bytes] | None) -> None:
        self.reads = reads
        self.says = says
        self._pid = pid
        self._child = child

    def tell(self, line: bytes) -> None:
        """Write a line to the driver, unless it has ended."""
        with contextlib.suppress(OSError, ValueError):
            self.reads.write(line + b"\n")
            self.reads.flush()

    def end(self) -> None:
        """Let the driver release its nodes and exit, and wait for its exit."""
        # End the driver by a message. Closing this end of the pipe may not end it, because the job's script holds the pipe open.
        self.tell(b"end")
        with contextlib.suppress(OSError):
            self.reads.close()
        deadline = time.monotonic() + _END_S
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        # Kill a driver that is still alive, because its `ray.shutdown` may hang. The cluster then frees its placement group.
        if self._is_alive():
            processes.send(self._pid, signal.SIGKILL)

    def _is_alive(self) -> bool:
        return self._child.poll() is None if self._child is not None else processes.is_alive(self._pid)


def driver_process(ray_python: str, library_dir: Path) -> DriverProcess:
    """Return the running process of `driver.py`, or start it.

    Raises:
        TargetError: The interpreter can't be run.
    """
    return _adopted() or _started(ray_python, library_dir)


def driver_path(library_dir: Path) -> Path:
    return library_dir / "paceline" / "targets" / "ray" / "driver.py"


def _adopted() -> DriverProcess | None:
    # Remove the variable, so that a second attempt or a nested run starts its own driver.
    pid = os.environ.pop(DRIVER_VARIABLE, "")
    try:
        if (
            not pid
            or not processes.is_alive(int(pid))
            or not all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (READS, SAYS))
        ):
            return None
        # The job's script has opened these pipes for this process. Child processes must not inherit them.
        for fd in (READS, SAYS):
            os.set_inheritable(fd, False)
        return DriverProcess(int(pid), os.fdopen(READS, "wb"), os.fdopen(SAYS, "rb"), None)
    except (OSError, ValueError):
        return None


def _started(ray_python: str, library_dir: Path) -> DriverProcess:
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.environ.get("PACELINE_SHELL_PYTHONPATH", "")}
    try:
        child = subprocess.Popen(
            [ray_python, str(driver_path(library_dir))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd="/",
            # Start a new session, so that signals to the supervisor's process group don't reach the driver.
            start_new_session=True,
        )
    except OSError as error:
        raise TargetError(f"the cluster's interpreter {ray_python!r} can't be run: {error}.") from error
    assert child.stdin is not None
    assert child.stdout is not None
    return DriverProcess(child.pid, child.stdin, child.stdout, child)  # type: ignore[arg-type]
