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


#: Children of this process that may still run.
started: list[subprocess.Popen[bytes]] = []


def start(
    module: str, run_dir: Path, fd: int, *words: str, python: str, library_dir: Path, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m module RUN_DIR FD WORDS...` in a new session and pass it the open file `fd`.

    options: cwd, stdout and stderr, as `subprocess.Popen` takes them.

    Raises:
        OSError: The process can't be started.
    """
    environment = {
        # A worker that submits a run must not look like a process of the new run: orphans are found by these variables.
        **processes.of_no_run(os.environ),
        "PYTHONPATH": str(library_dir),
        # Protects the supervisor when the submitting run kills all processes below itself.
        processes.SUPERVISOR_VARIABLE: run_dir.name,
        # The PYTHONPATH of the workers, which the one above replaces here.
        "PACELINE_SHELL_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    process = subprocess.Popen(
        [python, "-m", module, str(run_dir), str(fd), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        # A flock belongs to the open file, so the child holds it from the start and readers see no gap.
        pass_fds=(fd,),
        # Ctrl-C and a closed terminal signal the session of the submitting program only.
        start_new_session=True,
        **options,
    )
    if not started:
        atexit.register(_let_go)
    # The child outlives this program by design. If it ends earlier, the next start reaps it.
    started[:] = [earlier for earlier in started if earlier.poll() is None]
    started.append(process)
    return process


def _let_go() -> None:
    """Prevent Python's ResourceWarning about children that still run."""
    for process in started:
        process.returncode = process.poll() or 0


def library_dir(workspace_dir: Path, *, create: bool = True) -> Path:
    """Return a folder that holds `paceline` and nothing else, for the PYTHONPATH of workers and supervisors.

    The folder is `<workspace>/lib/<hash>/` with one link to this package. The interpreter of a run need not be the submitting
    one:
    its whole site-packages would leak every package of the submitting environment into the run.

    create: Make the folder; with False it may be missing.
    """
    package = Path(__file__).resolve().parents[1]
    # Distinguishes a few installations. A cryptographic hash would load OpenSSL into each supervisor.
    key = f"{zlib.crc32(os.fsencode(package)):08x}"
    folder = workspace_dir / "lib" / key
    link = folder / "paceline"
    if create and not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(package, target_is_directory=True)
    return folder
