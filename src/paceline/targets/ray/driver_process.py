"""The driver's process: the one that the job's script has started together with the supervisor, or a new one.

Loading Ray takes longer than anything else before a run's first line, so the script starts the first driver while the
supervisor itself is loaded. Its pipes are open files of the supervisor's, under these numbers:

    3    what the driver reads        4    what it says
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

#: The pid of the driver that runs already. Taken by the first who asks.
DRIVER_VARIABLE = "PACELINE_RAY_DRIVER"
READS, SAYS = 3, 4
_END_S = 6.0


class DriverProcess:
    """A process that runs `driver.py`. reads: what it is told; says: what it says, a line each."""

    def __init__(self, pid: int, reads: BinaryIO, says: BinaryIO, child: subprocess.Popen[bytes] | None) -> None:
        self.reads = reads
        self.says = says
        self._pid = pid
        self._child = child

    def tell(self, line: bytes) -> None:
        """Say a line to it; nothing happens where it has gone."""
        with contextlib.suppress(OSError, ValueError):
            self.reads.write(line + b"\n")
            self.reads.flush()

    def end(self) -> None:
        """Let it give everything back and go; returns when it has gone."""
        # Others have the first driver's pipe open too, so its end is not seen: hence a word.
        self.tell(b"end")
        with contextlib.suppress(OSError):
            self.reads.close()
        deadline = time.monotonic() + _END_S
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        # Ray's own shutdown can hang. The cluster frees a driver's placement group when its connection breaks.
        if self._is_alive():
            processes.send(self._pid, signal.SIGKILL)

    def _is_alive(self) -> bool:
        return self._child.poll() is None if self._child is not None else processes.is_alive(self._pid)


def driver_process(ray_python: str, library_dir: Path) -> DriverProcess:
    """The driver that runs already, if there is one, else a new one.

    Raises:
        TargetError: the interpreter can't be run.
    """
    return _adopted() or _started(ray_python, library_dir)


def driver_path(library_dir: Path) -> Path:
    return library_dir / "paceline" / "targets" / "ray" / "driver.py"


def _adopted() -> DriverProcess | None:
    # Taken out of the environment: a second attempt, or a run inside of this one, starts a driver of its own.
    pid = os.environ.pop(DRIVER_VARIABLE, "")
    try:
        if not pid or not processes.is_alive(int(pid)):
            return None
        if not all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (READS, SAYS)):
            return None
        # They came from the job's script. Programs that are started from here must not keep the driver's pipes open.
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
            # A signal to the supervisor's group does not reach it; the supervisor ends it by a word.
            start_new_session=True,
        )
    except OSError as error:
        raise TargetError(f"the cluster's interpreter {ray_python!r} can't be run: {error}.") from error
    assert child.stdin is not None
    assert child.stdout is not None
    return DriverProcess(child.pid, child.stdin, child.stdout, child)  # type: ignore[arg-type]
