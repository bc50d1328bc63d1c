"""Start supervisors on this machine, for targets whose supervisors run on the submitting machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.system import detached_process

#: Modules that a supervisor imports in advance if it will start workers on this machine.
FOR_THIS_MACHINE = ("paceline.targets.local", "paceline.launchers.processes", "ctypes")

_MODULE = "paceline.supervisor"
#: Run folder -> the supervisor loaded in advance for this run.
_loading: dict[Path, Early] = {}


def load(run_dir: Path, library_dir: Path, python: str, modules: Sequence[str]) -> None:
    """Begin to load a supervisor for a future run, if not begun before.

    The supervisor ends at `drop` or with this program, unless `start` passes the run to it.

    modules: Names of modules that the supervisor imports in advance.
    """
    if run_dir not in _loading:
        # Ignore an error here: `start` tries again, and raises the error if it persists.
        with contextlib.suppress(OSError):
            _loading[run_dir] = Early(run_dir, library_dir, python, modules)


def drop(run_dir: Path) -> None:
    """End the supervisor loaded for a run that will not be submitted."""
    if (early := _loading.pop(run_dir, None)) is not None:
        early.drop()


def start(run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
    """Start the run's supervisor, and pass it the locked file `lock_fd`. Return its pid."""
    early = _loading.pop(run_dir, None)
    if early is not None and (pid := early.begin(lock_fd)) is not None:
        return pid
    log = _open_log(run_dir)
    try:
        process = detached_process.start(
            _MODULE, run_dir, lock_fd, python=python, library_dir=library_dir, cwd=run_dir, stdout=log, stderr=log
        )
        return process.pid
    finally:
        os.close(log)


class Early:
    """A supervisor that loads before its run exists, in parallel with the submission.

    Until `begin`, the supervisor ends when the submitting program ends.

    modules: Names of modules that the supervisor imports in advance.
    """

    def __init__(self, run_dir: Path, library_dir: Path, python: str, modules: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        self._ours, theirs = socket.socketpair()
        with theirs:
            process = detached_process.start(
                _MODULE,
                run_dir,
                theirs.fileno(),
                *modules,
                python=python,
                library_dir=library_dir,
                cwd="/",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._pid = process.pid

    def begin(self, lock_fd: int) -> int | None:
        """Pass the run's lock to the supervisor. Return its pid; None if it has died."""
        log = _open_log(self.run_dir)
        try:
            with self._ours:
                socket.send_fds(self._ours, [b"begin"], [lock_fd, log])
        except OSError:
            return None
        finally:
            os.close(log)
        return self._pid

    def drop(self) -> None:
        """End the supervisor, unless `begin` has started its run."""
        self._ours.close()


def _open_log(run_dir: Path) -> int:
    return os.open(run_dir / "logs" / "driver.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
