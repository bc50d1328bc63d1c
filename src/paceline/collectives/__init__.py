"""Collective operations between the ranks of a run, by name, asynchronous, in any order of submission.

    engine = start()
    handle = engine.allreduce("gradient.0", array, op="average", out=array)
    handle.wait()

Over MPI (`pip install 'paceline[mpi]'`). Knows no framework: arrays are NumPy's.
"""

from __future__ import annotations

from paceline.collectives.engine import Engine, current, start, stop
from paceline.collectives.errors import ArgumentError, CollectivesError, MismatchError, ShutDownError
from paceline.collectives.handle import Handle
from paceline.collectives.settings import Settings

__all__ = [
    "ArgumentError",
    "CollectivesError",
    "Engine",
    "Handle",
    "MismatchError",
    "Settings",
    "ShutDownError",
    "current",
    "start",
    "stop",
]
