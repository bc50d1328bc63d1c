"""`horovod.keras`: `import horovod.keras as hvd`, for scripts that use `keras`."""

from __future__ import annotations

from paceline.compat.horovod._keras import settings
from paceline.compat.horovod._keras.module import names_for
from paceline.compat.horovod._keras.optimizer import PartialDistributedOptimizer
from paceline.compat.horovod.keras import callbacks, elastic

_names = names_for(settings.standalone())
__all__ = ["PartialDistributedOptimizer", "callbacks", "elastic"]
__all__ += list(_names)
globals().update(_names)
