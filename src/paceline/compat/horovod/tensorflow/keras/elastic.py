"""`horovod.tensorflow.keras.elastic`: training that goes on after a failed collective."""

from __future__ import annotations

from paceline.compat.horovod._keras import libraries
from paceline.compat.horovod._keras.callbacks import elastic_callbacks_for
from paceline.compat.horovod._keras.elastic import KerasState, run

_callbacks = elastic_callbacks_for(libraries.of_tensorflow())
__all__ = ["KerasState", "run"]
__all__ += list(_callbacks)
globals().update(_callbacks)
