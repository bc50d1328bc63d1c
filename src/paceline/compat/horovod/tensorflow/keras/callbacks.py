"""`horovod.tensorflow.keras.callbacks`: callbacks for `model.fit(callbacks=[...])`."""

from __future__ import annotations

from paceline.compat.horovod._keras import settings
from paceline.compat.horovod._keras.callbacks import callbacks_for

_callbacks = callbacks_for(settings.of_tensorflow())
__all__ = list(_callbacks)
globals().update(_callbacks)
