"""Pictures of a sweep, as PNG files and as one HTML file.

`figure_data` computes positions from 0 to 1. `svg` and `png` draw the figures, in a process that `run` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.system.detached_process import library_dir

LIMIT_S = 120  # Time limit in seconds. Drawing takes seconds, even for thousands of trials, so a longer process hangs.


def run(folder: RunFolder) -> None:
    """Draw a sweep's pictures in a separate process. Errors are only logged."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "paceline.sweeps.pictures", str(folder.path)],
            env={**os.environ, "PYTHONPATH": str(library_dir(folder.path.parents[1])), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"the pictures could not be drawn: {error}")
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        say(f"the pictures could not be drawn: {said[-1] if said else f'exit code {done.returncode}'}")
