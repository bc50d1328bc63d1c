"""A supervisor on this machine, for targets whose runs are looked after from here."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.system import detached_process

#: What a supervisor needs to start the workers of a run on this machine, beside what it imports itself.
FOR_THIS_MACHINE = ("paceline.targets.local", "paceline.launchers.processes", "ctypes")

_MODULE = "paceline.supervisor"
#: Supervisors that are being loaded for runs that are to come, by the run's folder.
_loading: dict[Path, Early] = {}


def load(run_dir: Path, library_dir: Path, python: str, modules: Sequence[str]) -> None:
    """Start to load the supervisor of a run that is to come, unless that has been done already (`paceline.cli.quick`).

    `start` begins it, `drop` ends it, and in any case it ends with this program if it was not begun. modules: as in `Early`.
    """
    if run_dir not in _loading:
        # What keeps this machine from starting it is said when the run is started.
        with contextlib.suppress(OSError):
            _loading[run_dir] = Early(run_dir, library_dir, python, modules)


def drop(run_dir: Path) -> None:
    """Let the supervisor end that is being loaded, if one is: there will be no run."""
    if (early := _loading.pop(run_dir, None)) is not None:
        early.drop()


def start(run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
    """Start the run's supervisor, detached, and hand it the open lock; its pid. One that is being loaded is begun."""
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
    """A supervisor that is loaded while the submitting program looks at hosts, and then told that its run is there.

    It ends with that program, unless it was told. modules: what it will need, loaded meanwhile.
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
        """Hand it the run's open lock; its pid, None where it has died."""
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
        """Let it end: there will be no run. Nothing happens to one that has been told."""
        self._ours.close()


def _open_log(run_dir: Path) -> int:
    return os.open(run_dir / "logs" / "driver.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
