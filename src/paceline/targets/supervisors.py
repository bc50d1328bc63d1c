"""Start supervisors on this machine, for targets whose supervisors run on the submitting machine."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.system import detached_process

#: Modules that a supervisor imports in advance, before it has work, if its workers will run on this machine.
FOR_THIS_MACHINE = ("paceline.targets.local", "paceline.launchers.processes", "ctypes")

_MODULE = "paceline.supervisor"
#: Command-line argument of a supervisor that starts before its run exists. Later `Early.begin` sends it the run's folder.
_AHEAD = "--ahead"
#: Folder of a run -> the supervisor process that was started in advance for this run.
_loading: dict[Path, Early] = {}
#: The supervisor process started in advance for this program's next run, and what it inherited: arguments, environment, limits.
_ahead: tuple[Early, object] | None = None


def load_ahead(library_dir: Path, python: str, modules: Sequence[str]) -> None:
    """Start a supervisor in advance for this program's next run, unless it exists.

    This speeds up programs that submit many short runs. The supervisor ends with this program, or after an idle minute.
    """
    global _ahead
    if _ahead is not None and _ahead[0].is_waiting():
        return
    drop_ahead()
    with contextlib.suppress(OSError):
        # SUPERVISOR_VARIABLE contains each supervisor's run id. This supervisor has no run yet, so use a name that no run has.
        early = Early(
            library_dir / f"next-{os.getpid()}-{time.monotonic_ns()}", library_dir, python, (_AHEAD, *modules)
        )
        # At exit close the supervisor's socket, before Python warns about an unclosed socket.
        atexit.unregister(drop_ahead)
        atexit.register(drop_ahead)
        _ahead = early, (library_dir, python, tuple(modules), _inherited())


def drop_ahead() -> None:
    """End the supervisor that `load_ahead` has started, if any."""
    global _ahead
    found, _ahead = _ahead, None
    if found is not None:
        found[0].drop()


def _inherited() -> object:
    """Return all values that child processes inherit, such as variables and limits."""
    texts = []
    for name in ("limits", "cgroup", "oom_score_adj", "status"):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/self/{name}").read_text())
    kept = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "SigBlk", "Cap", "NoNewPrivs", "Cpus_allowed", "Mems_allowed")
    status = [line for line in texts.pop().splitlines() if line.startswith(kept)] if len(texts) == 4 else []
    return os.getpid(), dict(os.environ), texts, status, os.getpriority(os.PRIO_PROCESS, 0)


def _taken(run_dir: Path, library_dir: Path, python: str, modules: Sequence[str]) -> Early | None:
    """Return the supervisor that `load_ahead` has started; None if outdated or missing."""
    global _ahead
    if _ahead is None or _ahead[1] != (library_dir, python, tuple(modules), _inherited()) or not _ahead[0].is_waiting():
        drop_ahead()
        return None
    found, _ahead = _ahead, None
    found[0].run_dir, found[0].is_for_any = run_dir, True
    return found[0]


def load(run_dir: Path, library_dir: Path, python: str, modules: Sequence[str]) -> None:
    """Start a supervisor process in advance for a run, unless already started.

    The supervisor ends at `drop` or with this program, unless `start` passes the run to it.

    modules: Names of modules that the supervisor imports in advance.
    """
    if run_dir not in _loading:
        # Ignore an error here: `start` tries a second time, and raises an error that persists.
        with contextlib.suppress(OSError):
            early = _taken(run_dir, library_dir, python, modules)
            _loading[run_dir] = early or Early(run_dir, library_dir, python, modules)


def drop(run_dir: Path) -> None:
    """End the supervisor that `load` has started, because the run's submission has failed."""
    if (early := _loading.pop(run_dir, None)) is not None:
        early.drop()


def start(run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
    """Start the run's supervisor with the locked file `lock_fd`. Return its pid."""
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
    """A supervisor process that imports modules while its run is being submitted.

    Until `begin` passes a run to the supervisor, it ends when the submitting program ends.

    modules: Names of modules that the supervisor imports in advance.
    """

    def __init__(self, run_dir: Path, library_dir: Path, python: str, modules: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        #: Whether the supervisor started before its run was known, and gets the run's folder from `begin`.
        self.is_for_any = False
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
        """Pass the run's lock to the supervisor. Return its pid; None if dead."""
        log = _open_log(self.run_dir)
        try:
            with self._ours:
                data = os.fsencode(self.run_dir) if self.is_for_any else b"begin"
                socket.send_fds(self._ours, [data], [lock_fd, log])
        except OSError:
            return None
        finally:
            os.close(log)
        return self._pid

    def is_waiting(self) -> bool:
        """Return whether the supervisor process is still alive."""
        return not select.select([self._ours], [], [], 0)[0]

    def drop(self) -> None:
        """End the supervisor, unless `begin` has started its run."""
        self._ours.close()


def _open_log(run_dir: Path) -> int:
    return os.open(run_dir / "logs" / "driver.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
