"""A supervisor on this machine, for targets whose runs are looked after from here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paceline import processes

#: Supervisors that this process has started and that may still run.
_started: list[subprocess.Popen[bytes]] = []


def start(run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
    """Start the run's supervisor, detached, and hand it the open lock; its pid."""
    environment = {
        # A worker that submits must not pass for its new run's: by these a deserted run's processes are found.
        **{name: value for name, value in os.environ.items() if name not in ("PACELINE_RUN_DIR", "PACELINE_RUN_ID")},
        "PYTHONPATH": str(library_dir),
        processes.SUPERVISOR_VARIABLE: run_dir.name,
        # What the workers' PYTHONPATH was, which ours stands in for.
        "PACELINE_SHELL_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    log = os.open(run_dir / "logs" / "driver.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        process = subprocess.Popen(
            [python, "-m", "paceline.supervisor", str(run_dir), str(lock_fd)],
            cwd=run_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
    finally:
        os.close(log)
    # It outlives this program by design; if it ends before, the next submission takes its exit code off the system.
    _started[:] = [earlier for earlier in _started if earlier.poll() is None]
    _started.append(process)
    return process.pid
