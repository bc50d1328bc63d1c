"""A supervisor on this machine, for targets whose runs are looked after from here."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.system import processes

# Not typing's: `paceline run` waits for this module before it starts a supervisor.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

#: What a supervisor needs to start the workers of a run on this machine, beside what it imports itself.
FOR_THIS_MACHINE = ("paceline.targets.this_machine", "paceline.launchers.processes", "ctypes")

#: Supervisors that this process has started and that may still run.
_started: list[subprocess.Popen[bytes]] = []
#: Those that are being loaded for runs that are to come, by the run's folder.
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
        return _start(run_dir, lock_fd, library_dir, python, cwd=run_dir, stdout=log, stderr=log).pid
    finally:
        os.close(log)


class Early:
    """A supervisor that is loaded while the submitting program looks at hosts, and then told that its run is there.

    It ends with that program, unless it was told. modules: what it will need, loaded meanwhile.
    """

    def __init__(self, run_dir: Path, library_dir: Path, python: str, modules: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        self._ours, theirs = socket.socketpair()
        null = subprocess.DEVNULL
        with theirs:
            fd = theirs.fileno()
            process = _start(run_dir, fd, library_dir, python, *modules, cwd="/", stdout=null, stderr=null)
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


def _start(
    run_dir: Path, fd: int, library_dir: Path, python: str, *modules: str, **options: Any
) -> subprocess.Popen[bytes]:
    """fd: the run's open lock, or a socket by which that comes."""
    environment = {
        # A worker that submits must not pass for its new run's: by these a deserted run's processes are found.
        **{name: value for name, value in os.environ.items() if name not in ("PACELINE_RUN_DIR", "PACELINE_RUN_ID")},
        "PYTHONPATH": str(library_dir),
        processes.SUPERVISOR_VARIABLE: run_dir.name,
        # What the workers' PYTHONPATH was, which ours stands in for.
        "PACELINE_SHELL_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    process = subprocess.Popen(
        [python, "-m", "paceline.supervisor", str(run_dir), str(fd), *modules],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,
        **options,
    )
    if not _started:
        atexit.register(_let_go)
    # It outlives this program by design; if it ends before, the next submission takes its exit code off the system.
    _started[:] = [earlier for earlier in _started if earlier.poll() is None]
    _started.append(process)
    return process


def _let_go() -> None:
    """Python would warn of each that still runs, where such warnings are shown."""
    for process in _started:
        process.returncode = process.poll() or 0


def _open_log(run_dir: Path) -> int:
    return os.open(run_dir / "logs" / "driver.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
