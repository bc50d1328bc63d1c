"""The pictures of a sweep that ends, drawn by a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.system.detached_process import library_dir

#: A sweep of thousands of trials takes seconds; what takes longer than this hangs.
LIMIT_S = 120


def run(folder: RunFolder) -> None:
    """Draw them into the sweep's outputs. That it can't be done is said, and no reason for a sweep to fail."""
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
