"""`horovod.tensorflow.keras`: `import horovod.tensorflow.keras as hvd`, for scripts that use `tf.keras`."""

from __future__ import annotations

from paceline.compat.horovod._keras import settings
from paceline.compat.horovod._keras.module import names_for
from paceline.compat.horovod.tensorflow.keras import callbacks, elastic

_names = names_for(settings.of_tensorflow())
__all__ = ["callbacks", "elastic"]
__all__ += list(_names)
globals().update(_names)
