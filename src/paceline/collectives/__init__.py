"""Collective operations between the ranks of a run, by name, asynchronous, in any order of submission.

    engine = start()
    handle = engine.allreduce("gradient.0", array, op="average", out=array)
    handle.wait()

Over MPI (`pip install 'paceline[mpi]'`). Knows no framework: arrays are NumPy's. Loaded on first use of a name: every
worker looks into this package for two small modules before its script begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "engine": ("Engine", "current", "start", "stop"),
    "errors": ("ArgumentError", "CollectivesError", "MismatchError", "ShutDownError"),
    "handle": ("Handle",),
    "settings": ("Settings",),
}
_HOME_OF = {name: f"paceline.collectives.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        from importlib import import_module

        value: object = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'paceline.collectives' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
