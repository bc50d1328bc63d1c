"""Named asynchronous collective operations between the ranks of a run, in any order of submission.

    engine = start()
    handle = engine.allreduce("gradient.0", array, op="average", out=array)
    handle.wait()

The operations work on NumPy arrays over MPI (`pip install 'paceline[mpi]'`) or torch's Gloo, without a framework. Python loads
the public names on first use, because every worker imports this package for a few small functions before its script begins.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

# Don't import TYPE_CHECKING from typing, which loads slowly: each worker loads this module before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.collectives.engine import Engine, current, start, stop
    from paceline.collectives.errors import ArgumentError, CollectivesError, MismatchError, ShutDownError
    from paceline.collectives.handle import Handle
    from paceline.collectives.recorder import answer_recorder_requests as answer_recorder_requests
    from paceline.collectives.settings import EngineSettings
    from paceline.collectives.step_hooks import count_steps as count_steps
    from paceline.collectives.store_address import keep_to_master_address as keep_to_master_address
    from paceline.collectives.store_address import store_listener as store_listener

__all__ = ["ArgumentError", "CollectivesError", "Engine", "EngineSettings", "Handle", "MismatchError"]
__all__ += ["ShutDownError", "current", "start", "stop"]

_HOMES = {
    "paceline.collectives.engine": ("Engine", "current", "start", "stop"),
    "paceline.collectives.errors": ("ArgumentError", "CollectivesError", "MismatchError", "ShutDownError"),
    "paceline.collectives.handle": ("Handle",),
    "paceline.collectives.settings": ("EngineSettings",),
    # Some packages may import only `paceline.collectives`, but not its modules (tests/test_layers.py). They use the names below.
    "paceline.collectives.recorder": ("answer_recorder_requests",),
    "paceline.collectives.step_hooks": ("count_steps",),
    "paceline.collectives.store_address": ("keep_to_master_address", "store_listener"),
}

__getattr__ = face(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
