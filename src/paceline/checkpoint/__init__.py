"""Checkpoints of plain training scripts, in two calls: `save(state, step)` and `latest()`.

    from paceline import checkpoint

    state = {"model": model, "optimizer": optimizer}
    start = 0
    if found := checkpoint.latest():
        found.load_into(state)
        start = found.step
    for step in range(start, 10_000):
        ...  # one training step
        checkpoint.save(state, step + 1, every=100)

The import needs only the standard library. A state with tensors or arrays needs torch or numpy.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

# Don't import TYPE_CHECKING from typing, which loads slowly: Paceline's Horovod modules load this module before a script runs.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.checkpoint.saving import Checkpoint, latest, save, wait

__all__ = ["Checkpoint", "latest", "save", "wait"]

__getattr__ = face(__name__, {"paceline.checkpoint.saving": ("Checkpoint", "latest", "save", "wait")})


def __dir__() -> list[str]:
    return __all__
