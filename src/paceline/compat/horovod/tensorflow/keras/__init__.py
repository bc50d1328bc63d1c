"""`horovod.tensorflow.keras`: `import horovod.tensorflow.keras as hvd`, for scripts that use `tf.keras`."""

from __future__ import annotations

from paceline.compat.horovod._keras.module import names_for, submodules
from paceline.compat.horovod._keras.settings import of_tensorflow

_names = names_for(of_tensorflow()) | submodules(__name__, of_tensorflow())
__all__ = list(_names)
globals().update(_names)
