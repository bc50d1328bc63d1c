"""The MPI library that mpi4py loads in an interpreter; the mpirun has to belong to it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass

from paceline.system import processes

#: Loads the library and does not initialise it.
_CODE = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
_TIMEOUT_S = 20


@dataclass(frozen=True)
class MpiLibrary:
    """A library by its own words. version: (major, minor) of an Open MPI, None of another MPI."""

    name: str
    version: tuple[int, int] | None


@functools.cache
def mpi4py_library(python: str) -> MpiLibrary | None:
    """The library that mpi4py loads there; None where there is no mpi4py, or none that can be loaded.

    Takes a tenth of a second: the interpreter is started for it.
    """
    try:
        # In a process of its own: a library that is loaded stays, and a broken one may end the process that loads it.
        environment = processes.with_home(os.environ)
        done = processes.said_by([python, "-c", _CODE], timeout_s=_TIMEOUT_S, environment=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # The text stands in a buffer of fixed size; some libraries leave NULs behind it.
    text = done.stdout.partition("\0")[0].strip()
    if done.returncode != 0 or not text:
        return None
    name = text.splitlines()[0].partition(", package")[0].strip()
    found = re.match(r"Open MPI v?(\d+)\.(\d+)", name)
    return MpiLibrary(name, (int(found[1]), int(found[2])) if found else None)
