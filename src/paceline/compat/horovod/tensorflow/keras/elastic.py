"""`horovod.tensorflow.keras.elastic`: training that goes on after a failed collective."""

from __future__ import annotations

from typing import Any

from paceline.compat.horovod._keras import libraries
from paceline.compat.horovod._keras.callbacks import classes_for
from paceline.compat.horovod._keras.elastic import KerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_classes = classes_for(libraries.of_tensorflow())
CommitStateCallback: Any = _classes.CommitStateCallback
UpdateBatchStateCallback: Any = _classes.UpdateBatchStateCallback
UpdateEpochStateCallback: Any = _classes.UpdateEpochStateCallback
