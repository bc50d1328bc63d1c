"""Processes that outlive the program which starts them: supervisors of runs, controllers of sweeps."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import zlib
from pathlib import Path

from paceline.system import processes

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


#: Those that this process has started and that may still run.
started: list[subprocess.Popen[bytes]] = []


def start(
    module: str, run_dir: Path, fd: int, *words: str, python: str, library_dir: Path, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m module RUN_DIR FD WORDS...` in a session of its own, and hand it the open file `fd`.

    options: cwd, stdout and stderr, as `subprocess.Popen` takes them.

    Raises:
        OSError: no process can be started.
    """
    environment = {
        # A worker that submits must not pass for its new run's: by these a deserted run's processes are found.
        **processes.of_no_run(os.environ),
        "PYTHONPATH": str(library_dir),
        # By this mark it is spared where the run that has submitted it ends all processes below itself.
        processes.SUPERVISOR_VARIABLE: run_dir.name,
        # What the workers' PYTHONPATH was, which ours stands in for.
        "PACELINE_SHELL_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    process = subprocess.Popen(
        [python, "-m", module, str(run_dir), str(fd), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        # A flock belongs to the open file: whoever is started holds it from its first moment on, and readers find no gap.
        pass_fds=(fd,),
        # Ctrl-C and the closing of a terminal reach the submitting program's session alone.
        start_new_session=True,
        **options,
    )
    if not started:
        atexit.register(_let_go)
    # It outlives this program by design; if it ends before, the next start takes its exit code off the system.
    started[:] = [earlier for earlier in started if earlier.poll() is None]
    started.append(process)
    return process


def _let_go() -> None:
    """Python would warn of each that still runs, where such warnings are shown."""
    for process in started:
        process.returncode = process.poll() or 0


def library_dir(workspace_dir: Path, *, create: bool = True) -> Path:
    """The folder, made on first use: `<workspace>/lib/<which paceline>/`, with a link to this package in it.

    create: make it; with False it may not be there.
    """
    package = Path(__file__).resolve().parents[1]
    # Tells a few installations apart. A digest would load OpenSSL into each supervisor, for nothing else.
    key = f"{zlib.crc32(os.fsencode(package)):08x}"
    folder = workspace_dir / "lib" / key
    link = folder / "paceline"
    if create and not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(package, target_is_directory=True)
    return folder
