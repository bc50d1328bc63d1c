"""`horovod.keras`: `import horovod.keras as hvd`, for scripts that use `keras`."""

from __future__ import annotations

from paceline.compat.horovod._keras.module import names_for, submodules
from paceline.compat.horovod._keras.optimizer import PartialDistributedOptimizer
from paceline.compat.horovod._keras.settings import standalone

_names = names_for(standalone()) | submodules(__name__, standalone())
__all__ = ["PartialDistributedOptimizer"]
__all__ += list(_names)
globals().update(_names)
