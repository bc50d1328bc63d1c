"""Start processes that outlive their parent: supervisors of runs, controllers of sweeps."""

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


#: Child processes of this process that may still run.
started: list[subprocess.Popen[bytes]] = []


def start(
    module: str, run_dir: Path, fd: int, *words: str, python: str, library_dir: Path, **options: Any
) -> subprocess.Popen[bytes]:
    """Start and return `python -m module RUN_DIR FD WORDS...` in a new session.

    The process inherits the open file `fd`. options: cwd, stdout and stderr, as `subprocess.Popen` takes them.

    Raises:
        OSError: The process can't be started.
    """
    environment = {
        # Drop the caller's variables that mark a run's processes: a worker that submits a run does not belong to the new run.
        **processes.of_no_run(os.environ),
        "PYTHONPATH": str(library_dir),
        # With this variable, the new supervisor survives if the submitting run kills all of its descendants.
        processes.SUPERVISOR_VARIABLE: run_dir.name,
        # Pass the caller's PYTHONPATH on to the workers, because the supervisor gets another PYTHONPATH above.
        "PACELINE_SHELL_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    process = subprocess.Popen(
        [python, "-m", module, str(run_dir), str(fd), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        # A flock belongs to the open file, so the child holds the lock from the start, and readers never find it free.
        pass_fds=(fd,),
        # Ctrl-C and a closed terminal signal the session of the submitting program only.
        start_new_session=True,
        **options,
    )
    if not started:
        atexit.register(_let_go)
    # The child process outlives this program by design. If the child ends earlier, the next call reaps it.
    started[:] = [earlier for earlier in started if earlier.poll() is None]
    started.append(process)
    return process


def _let_go() -> None:
    """Prevent a ResourceWarning about child processes that outlive this program."""
    for process in started:
        process.returncode = process.poll() or 0


def library_dir(workspace_dir: Path, *, create: bool = True) -> Path:
    """Return a folder with `paceline` alone, for the PYTHONPATH of workers and supervisors.

    The folder is `<workspace>/lib/<hash>/` with a link to this package. The run, which may use another interpreter,
    then does not import other packages of the submitting program.

    create: Whether to create the folder if it is missing.
    """
    package = Path(__file__).resolve().parents[1]
    # A short hash suffices for a few installations. A cryptographic hash would load OpenSSL into each supervisor.
    key = f"{zlib.crc32(os.fsencode(package)):08x}"
    folder = workspace_dir / "lib" / key
    link = folder / "paceline"
    if create and not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(package, target_is_directory=True)
    return folder
